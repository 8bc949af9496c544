"""What the submitter of a run may set at a client: a list of settings, with the client's own privacy as a floor.

The client's own configuration is the app's spec and the node's config. Whoever submits a run may change settings that
decide how the model is trained. What a machine imports, which of its files are read or written, and how little of its
data may be learned from its replies is decided by the client.
"""

from __future__ import annotations

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
UNUSED = {"callbacks"}  # only the server uses them: the client keeps its own
CODE = ("module", "module_dir")  # keys of a task that decide what is imported
SPENDING = (
    "clients_per_round",
    "epochs",
    "batch_size",
)  # with a fixed noise they decide ε, as rounds and steps do


def permitted(own: Table, run: Table, module: str) -> Table:
    """Return the settings of a run as a client takes them, or raise.

    Args:
        own: The table of the app's own spec.
        run: The same with the submitter's changes.
        module: The module of the node's config, which replaces a custom task's own; "" if it names none.
    """
    run = {key: value for key, value in run.items() if key not in UNUSED}
    run |= {key: own[key] for key in UNUSED if key in own}
    for key in sorted({*own, *run} - SETTABLE - UNUSED):
        mine, theirs = (flat({key: table.get(key, {})}) for table in (own, run))
        for place in (one for one in {**mine, **theirs} if mine.get(one) != theirs.get(one)):
            raise _refusal(place, theirs.get(place), "which a client decides itself")
    allowed = dict(_places(own))
    task = run.get("task")
    if module and isinstance(task, dict) and task.get("name") == "custom":
        run["task"] = {key: value for key, value in task.items() if key not in CODE} | {
            "module": module
        }
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
        table = tables.describe(floor)
        changed = {key for key, value in table.items() if getattr(Privacy, key, None) != value}
        told = ", ".join(f"privacy.{key} = {shown(table[key])}" for key in table if key in changed)
        raise SpecError(
            f"the run has no `privacy`, but this client asks for {told}; set it for the run"
        )
    private, fixed = floor.clip is not None, floor.noise is not None
    limited = floor.epsilon is not None
    weaker = {
        "level": private and given.level != floor.level,
        "clip": private and not at_most(given.clip, floor.clip),
        "quantile": private and given.quantile != floor.quantile,
        "noise": fixed and not at_most(floor.noise, given.noise),
        "epsilon": limited and not at_most(given.epsilon, floor.epsilon),
        "delta": limited and given.delta > floor.delta,
        "secure": floor.secure > given.secure,
        "secure_signed": floor.secure_signed > given.secure_signed,
        "secure_threshold": floor.secure and given.secure_threshold < floor.secure_threshold,
    }
    for name in (name for name, less in weaker.items() if less):
        raise SpecError(
            f"the run has privacy.{name} = {shown(getattr(given, name))}, which protects this client less than its own "
            f"{shown(getattr(floor, name))}; leave it, or set it to something stronger"
        )
    if not fixed or own is None:
        return
    steps = (spec.method.local_steps, own.method.local_steps)
    spent = {name: (getattr(spec, name), getattr(own, name)) for name in SPENDING}
    spent |= {"rounds": (spec.rounds, min(spec.rounds, own.rounds))}
    spent |= {"method.local_steps": steps} if floor.level == "example" else {}
    for name, (theirs, mine) in spent.items():
        if theirs != mine:
            raise SpecError(
                f"the run has {name} = {shown(theirs)}, and this client {shown(mine)}: with privacy.noise that would "
                "spend another ε; leave it, or use privacy.epsilon in the app's spec"
            )


def at_most(value: float | None, most: float | None) -> bool:
    """Whether both are given, and one is at most the other."""
    return value is not None and most is not None and value <= most


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
        if key == "device":  # such as cuda:0
            continue
        named = key.startswith("task.") and key.split(".")[-1] in (*CODE, *PATHS)
        for text in _texts(value):
            if named or set(text) & set(":/\\~"):
                yield key, text


def _texts(value: Any) -> Iterator[str]:
    """All texts of a value, also inside lists and tables."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)
