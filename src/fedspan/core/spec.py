"""A run as a value: `Spec` ⇄ TOML.

A spec holds everything that decides a run. `table` gives it as nested plain values with all defaults, for people and
files; `decisions` gives only what decides the numbers and differs from a default, so that a run is still recognized
by a later version that has more settings.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
import tomllib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from fedspan.core import registry, tables
from fedspan.core.callback import Callback
from fedspan.core.config import Search, Settings
from fedspan.core.digest import digest, source_of
from fedspan.core.errors import (
    SpecError,
    at_least,
    at_most,
    one_line,
    path_of,
    positive,
    shown,
)
from fedspan.core.method import Method
from fedspan.core.metric import column_of, direction_of
from fedspan.core.task import Task

Table = dict[str, Any]
PATHS = ("path", "test_path", "own_file")  # keys of a task's `data` that name files
# They do not decide a round; `rounds` does under a schedule.
UNDECIDED = ("rounds", "seed", "engine", "device", "eval_clients_every")


@dataclass(frozen=True, kw_only=True)
class Spec(Settings):
    """Everything that decides a run.

    Args:
        rounds: Number of rounds.
        method: The federated method.
        task: What is trained on.
        batch_size: Examples per local step, or "full".
        epochs: Local steps as passes over the mean client's examples, or over each client's own with
            `training.per_client`; replaces `method.local_steps`.
        clients_per_round: Clients that take part in a round. None takes all.
        seed: Decides every random draw.
        device: Where local steps run: "auto", "cpu" or a torch device.
        dtype: The type of the model's numbers.
        metrics: Names of metrics to report; none takes the task's own.
        eval_every: Rounds between two evaluations.
        eval_clients_every: Rounds between two evaluations of every client on its own data, a multiple of
            `eval_every`. None does not evaluate clients.
        training, participation, projection, engine, privacy, federation: See the classes of these names.
        callbacks: What follows the run, such as early stopping.
        search: How `method.lr = "search"` finds the step size.
    """

    rounds: int
    method: Method
    task: Task
    epochs: float | None = None
    clients_per_round: int | None = None
    seed: int = 0
    eval_every: int = 1
    eval_clients_every: int | None = None
    callbacks: tuple[Callback, ...] = ()
    search: Search = field(default_factory=Search)

    def __post_init__(self) -> None:
        object.__setattr__(self, "callbacks", as_callbacks(self.callbacks))
        super().__post_init__()
        if self.device.startswith("meta"):
            raise SpecError(f"`device` {self.device!r} holds no numbers; use 'auto' or 'cpu'")
        for name in ("rounds", "eval_every", "eval_clients_every", "clients_per_round"):
            if (count := getattr(self, name)) is not None:
                at_least(name, count, 1)
        at_most("rounds", self.rounds, 10**9)
        if self.eval_clients_every is not None and self.eval_clients_every % self.eval_every:
            raise SpecError(
                f"`eval_clients_every` must be a multiple of `eval_every`, {self.eval_every}, got "
                f"{self.eval_clients_every}"
            )
        if self.epochs is not None:
            positive("epochs", self.epochs)
            at_most("epochs", math.ceil(self.epochs), 10**6)
        elif self.training.per_client:
            raise SpecError(
                "`training.per_client` is for `epochs`: passes over each client's own examples; set `epochs`"
            )
        at_least("seed", self.seed, 0)
        if self.seed >= 2**64:
            raise SpecError(f"`seed` must be below 2**64, got {shown(self.seed)}")
        if self.dp is not None:
            object.__setattr__(self, "method", self.method.without_tests())

    @staticmethod
    def from_table(table: Mapping[str, Any]) -> Spec:
        """A spec from nested plain values; every key and type is checked."""
        for kind in ("method", "task"):  # a key that stands outside of its table
            given = table.get(kind)
            name = given.get("name") if isinstance(given, Mapping) else None
            inside = tables.typed(registry.choices(kind).get(str(name), Spec)).keys()
            for key in table:
                if key in inside - tables.typed(Spec).keys():
                    raise SpecError(f"`[spec]` has no key {shown(key)}; it is `{kind}.{key}`")
        spec: Spec = tables.make(Spec, table)
        return spec

    @staticmethod
    def load(path: Path | str, changes: tuple[str, ...] = ()) -> Spec:
        """A spec from a TOML file, with changes such as `method.lr=0.1` applied."""
        return Spec.from_table(with_changes(read_toml(path_of("spec", path)), changes))

    def table(self) -> Table:
        """Nested plain values with all defaults."""
        metrics = list(self.metrics)
        for place, one in enumerate(metrics):  # of a class, an object or a function what it is
            if not isinstance(one, str):
                metrics[place] = {"name": column_of(one), "source": source_of(one)}
                if (higher := direction_of(one)) is not None:
                    metrics[place]["higher_is_better"] = higher
        table: Table = tables.describe(self)
        return table | {"metrics": metrics}

    def toml(self) -> str:
        """`table` as TOML text."""
        return tomli_w.dumps(self.table())

    @property
    def length_decides(self) -> bool:
        """Whether the numbers of a round depend on `rounds`: by a schedule, or by noise for an ε of the whole run."""
        return self.method.spans_run or (self.dp is not None and self.dp.epsilon is not None)

    def decisions(self) -> Table:
        """The settings that decide the numbers, where they differ from their defaults."""
        table: Table = tables.describe(self, changed=True)
        for name in UNDECIDED:
            if not (name == "rounds" and self.length_decides):
                table.pop(name, None)
        table.pop("callbacks", None)
        deciding = [tables.describe(one) for one in self.callbacks if one.decides]
        return table | ({"callbacks": deciding} if deciding else {})

    def identity(self) -> str:
        """A short hash of `decisions`: runs of one identity differ in their seed and length alone."""
        return digest(json.dumps(_ordered(self.decisions())))


def as_callbacks(given: Any) -> tuple[Callback, ...]:
    """Callbacks from what a user gives: one or several, each as a value, a name or a table with a name."""
    several = given if isinstance(given, list | tuple) else (given,)
    found = tuple(tables.build("callback", one, "callbacks") for one in several)
    for one in found:
        tables.check_types(one)
    return found


def read_toml(path: Path) -> Table:
    """The table of a spec file. The data files and modules that its tasks name are relative to its directory."""
    if path.is_dir():
        raise SpecError(f"{str(path)!r} is a directory; give the spec file in it")
    if not path.is_file():
        raise SpecError(f"spec file {str(path)!r} does not exist")
    try:
        table: Table = tomllib.loads(path.read_text("utf-8"))
    # not TOML, not text, a number of thousands of digits, deep nesting
    except (ValueError, RecursionError) as error:
        raise SpecError(f"spec file {str(path)!r} is not TOML: {one_line(str(error))}") from None
    except OSError as error:
        raise SpecError(f"spec file {str(path)!r} cannot be read: {error.strerror}") from None
    found: Table = _placed(table, path.resolve().parent)
    return found


def _placed(value: Any, folder: Path, key: str = "") -> Any:
    """A value of TOML in which the paths of every task are absolute."""
    if isinstance(value, list):
        return [_placed(inner, folder) for inner in value]
    if not isinstance(value, dict):
        return value
    table = {name: _placed(one, folder, name) for name, one in value.items()}
    paths: Table = {}
    if key == "federation":
        paths = {k: v for k, v in table.items() if Path(str(v)).suffix}
    if key == "data":
        paths = {k: v for k, v in table.items() if k in PATHS}
    if key == "task":
        if table.get("name") == "regression":
            paths = {"data": table.get("data")}
        if "module" in table or ":" in str(table.get("model", "")):
            table.setdefault("module_dir", str(folder))  # where its module is looked for
    return table | {k: str(folder / v) for k, v in paths.items() if isinstance(v, str)}


def with_changes(table: Table, changes: tuple[str, ...]) -> Table:
    """The table with settings such as `a.b=value`; values are TOML, or else text.

    Another choice, as in `method.name=fedavg`, keeps the settings that mean the same for it: those that both classes
    inherit from one class. A warning names the others.
    """
    values: Table = {}
    for change in changes:
        key, sign, text = change.partition("=")
        if not sign or not key:
            raise SpecError(f"a change of a spec is written key=value, got {shown(change)}")
        values[key.strip()] = toml_value(text)
    for key, name in values.items():
        where, _, last = key.rpartition(".")
        field = where.rpartition(".")[2]
        kind = {"space": "projector", "local": "optimizer"}.get(field, field)
        before: Any = table
        for part in where.split("."):
            before = before.get(part) if isinstance(before, Mapping) else None
        if last != "name" or kind not in registry.KINDS or not isinstance(before, Mapping):
            continue
        known = registry.accepted(kind)
        old, new = known.get(str(before.get("name"))), known.get(str(name))
        if old is None or new is None:
            continue
        kept = {k: v for k, v in before.items() if k == "name" or _top(old, k) is _top(new, k)}
        if dropped := ", ".join(one for one in before if one not in kept):
            warnings.warn(
                f"{key}={name} drops {dropped} of the {kind} {before['name']!r}", stacklevel=3
            )
            table = with_values(table, {where: kept})
    return with_values(table, values)


def _top(cls: type, field: str) -> type | None:
    """The class at the top that first has a field."""
    bases = reversed(cls.__mro__)
    return next((base for base in bases if field in inspect.get_annotations(base)), None)


def toml_value(text: str) -> Any:
    """A value as TOML has it, or else the text itself."""
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    if len(table) > 1:
        raise SpecError(
            f"one setting per change, got {one_line(text)!r}; give another --set for the next"
        )
    return table["value"]


def with_values(table: Mapping[str, Any], values: Mapping[str, Any]) -> Table:
    """The table with values at dotted keys."""
    found: Table = copy.deepcopy(dict(table))
    for path, value in values.items():
        *parents, last = path.split(".")
        inner = found
        for parent in parents:
            inner = inner.setdefault(parent, {})
            if not isinstance(inner, dict):
                raise SpecError(f"cannot set {path!r}: {parent!r} is a value, not a table")
        inner[last] = value
    return found


def flat(table: Mapping[str, Any], prefix: str = "") -> Table:
    """Dotted key → value."""
    found: Table = {}
    for key, value in table.items():
        nested = isinstance(value, Mapping)
        found |= flat(value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return found


def _ordered(value: Any, key: str = "") -> Any:
    """Fields in the order of their names; the patterns of a `rank` in the order in which they are tried."""
    if isinstance(value, Mapping):
        pairs = [[name, _ordered(inner, name)] for name, inner in value.items()]
        return pairs if key == "rank" else sorted(pairs, key=lambda pair: pair[0])
    return [_ordered(inner) for inner in value] if isinstance(value, list) else value
