"""What the submitter of a run may set at a client: a list of settings, with the client's own privacy as a floor.

The client's own configuration is the app's spec and the node's config. Whoever submits a run may change settings that
decide how the model is trained. What a machine imports, which of its files are read or written, and how little of its
data may be learned from its replies is decided by the client.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, cast

from fedspan.core import tables
from fedspan.core.errors import SpecError, shown
from fedspan.core.privacy import Privacy
from fedspan.core.spec import PATHS, Spec, Table, flat, toml_value

SETTABLE = {
    "rounds", "batch_size", "epochs", "clients_per_round", "seed", "device", "dtype", "metrics", "eval_every",
    "eval_clients_every", "method", "task", "training", "participation", "projection", "search", "privacy",
}  # fmt: skip
UNUSED = {"callbacks", "federation"}  # a client keeps its own, and does not use them
CODE = ("module", "module_dir")  # keys of a task that decide what is imported
# with a fixed noise they decide ε, as rounds and steps do
SPENDING = ("clients_per_round", "epochs", "batch_size", "rounds")
FLOOR = {  # how a run's setting must compare with the client's own, if the client has set the second one
    "level": (operator.eq, "clip"),
    "clip": (operator.le, "clip"),
    "quantile": (operator.eq, "clip"),
    "noise": (operator.ge, "noise"),
    "epsilon": (operator.le, "epsilon"),
    "delta": (operator.le, "epsilon"),
    "secure": (operator.ge, "secure"),
    "secure_signed": (operator.ge, "secure_signed"),
    "secure_threshold": (operator.ge, "secure"),
}


def permitted(own: Table, run: Table, module: str) -> Table:
    """Return the settings of a run as a client takes them, or raise.

    Args:
        own: The table of the app's own spec.
        run: The same with the submitter's changes.
        module: The module of the node's config, which replaces a custom task's own; "" if it names none.
    """
    run = {key: value for key, value in run.items() if key not in UNUSED}
    run |= {key: own[key] for key in UNUSED if key in own}
    mine, theirs = (
        flat({key: value for key, value in table.items() if key not in SETTABLE | UNUSED})
        for table in (own, run)
    )
    for place in {**mine, **theirs}:
        if mine.get(place) != theirs.get(place):
            raise _refusal(place, theirs.get(place), "which a client decides itself")
    allowed = dict(_places(own))
    task = run.get("task")
    if module and isinstance(task, dict) and task.get("name") == "custom":
        kept = {key: value for key, value in task.items() if key not in CODE}
        run["task"] = kept | {"module": module}
        allowed["task.module"] = module
    for key, value in _places(run):
        if allowed.get(key) != value and not (module and value.startswith(f"{module}:")):
            raise _refusal(key, value, "but what a client imports and reads is its own choice")
    return run


def check_floor(spec: Spec, floor: Privacy | None, own: Spec | None) -> None:
    """Raise if a run protects a client less than the client's own privacy settings.

    Args:
        spec: The run's settings.
        floor: The client's own privacy settings; None sets no floor.
        own: The app's own spec, if the floor is of it. Under a fixed noise more rounds or steps would spend more.
    """
    if floor is None:
        return
    given = spec.privacy
    if given is None:
        table = tables.describe(floor, changed=True)
        told = ", ".join(f"privacy.{key} = {shown(value)}" for key, value in table.items())
        raise SpecError(
            f"the run has no `privacy`, but this client asks for {told}; set it for the run"
        )
    for name, (holds, needed) in FLOOR.items():
        theirs, mine, counts = getattr(given, name), getattr(floor, name), getattr(floor, needed)
        if theirs is None or mine is None:
            holds = operator.is_
        if counts is not None and counts is not False and not holds(theirs, mine):
            raise SpecError(
                f"the run has privacy.{name} = {shown(theirs)}, which protects this client less than its own "
                f"{shown(mine)}; leave it, or set it to something stronger"
            )
    if floor.noise is None or own is None:
        return
    steps = ("method.local_steps",) if floor.level == "example" else ()
    for name in (*SPENDING, *steps):
        theirs, mine = map(operator.attrgetter(name), (spec, own))
        if theirs != mine and not (name == "rounds" and theirs < mine):
            raise SpecError(
                f"the run has {name} = {shown(theirs)}, and this client {shown(mine)}: with privacy.noise that would "
                "spend another ε; leave it, or use privacy.epsilon in the app's spec"
            )


def privacy_of(text: str) -> Privacy:
    """The floor of a node's own config: `privacy`, a TOML table such as '{clip = 0.5, epsilon = 8}'."""
    table = toml_value(text)
    if not isinstance(table, dict):
        raise SpecError(
            f"the node's config has privacy = {shown(text)}; write a table, such as {{secure = true}}"
        )
    return cast(Privacy, tables.make(Privacy, table))


def _refusal(key: str, value: Any, why: str) -> SpecError:
    return SpecError(
        f"`set` of the run config gives {key} = {shown(value)}, {why}; name it in the app's spec, or a module in the "
        "node's config as module"
    )


def _places(table: Table) -> Iterator[tuple[str, str]]:
    """Settings that name code or files, as (dotted key, text)."""
    for key, value in flat(table).items():
        named = key.startswith("task.") and key.split(".")[-1] in (*CODE, *PATHS)
        for text in _texts(value):
            if key != "device" and (named or set(text) & set(":/\\~")):  # such as cuda:0
                yield key, text


def _texts(value: Any) -> Iterator[str]:
    """All texts of a value, also inside lists and tables."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)
