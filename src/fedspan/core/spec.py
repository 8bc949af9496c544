"""A run as a value: `Spec` ⇄ TOML.

A spec holds everything that decides a run. `table` gives it as nested plain values with all defaults, for people and
files; `decisions` gives only what decides the numbers and differs from a default, so that a run is still recognized
by a later version that has more settings.
"""

from __future__ import annotations

import dataclasses
import datetime
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
from fedspan.core.errors import SpecError, at_least, at_most, one_line, path_of, positive, shown
from fedspan.core.method import Method
from fedspan.core.metric import column_of, direction_of
from fedspan.core.task import Task

Table = dict[str, Any]
PATHS = ("path", "test_path")  # keys of a task's `data` that name files
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
        epochs: Local steps as passes over the mean client's examples; replaces `method.local_steps`.
        clients_per_round: Clients that take part in a round. None takes all.
        seed: Decides every random draw.
        device: Where local steps run: "auto", "cpu" or a torch device.
        dtype: The type of the model's numbers.
        metrics: Names of metrics to report; none takes the task's own.
        eval_every: Rounds between two evaluations.
        eval_clients_every: Rounds between two evaluations of every client on its own data, a multiple of
            `eval_every`. None does not evaluate clients.
        training, participation, projection, engine, privacy: See the classes of these names.
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
        super().__post_init__()
        tables.check_types(self)
        if self.device.startswith("meta"):
            raise SpecError(f"`device` {self.device!r} holds no numbers; use 'auto' or 'cpu'")
        at_least("rounds", self.rounds, 1)
        at_least("eval_every", self.eval_every, 1)
        if self.eval_clients_every is not None:
            at_least("eval_clients_every", self.eval_clients_every, 1)
            if self.eval_clients_every % self.eval_every:
                raise SpecError(
                    f"`eval_clients_every` must be a multiple of `eval_every`, {self.eval_every}, got "
                    f"{self.eval_clients_every}"
                )
        at_most("rounds", self.rounds, 10**9)
        if self.epochs is not None:
            positive("epochs", self.epochs)
            at_most("epochs", math.ceil(self.epochs), 10**6)
        if self.clients_per_round is not None:
            at_least("clients_per_round", self.clients_per_round, 1)
        at_least("seed", self.seed, 0)
        if self.seed >= 2**64:
            raise SpecError(f"`seed` must be below 2**64, got {shown(self.seed)}")
        if self.dp is not None:
            object.__setattr__(self, "method", self.method.without_tests())
        object.__setattr__(self, "callbacks", tuple(self.callbacks))
        for one in self.callbacks:
            tables.check_types(one)

    @staticmethod
    def from_table(table: Mapping[str, Any]) -> Spec:
        """A spec from nested plain values; every key and type is checked."""
        table = dict(table)
        metrics = table.pop("metrics", [])
        if not isinstance(metrics, list | tuple) or not all(
            isinstance(name, str) for name in metrics
        ):
            raise SpecError(f"`metrics` must be a list of names, got {shown(metrics)}")
        _check_place(table)
        spec = tables.make(Spec, table)
        assert isinstance(spec, Spec)
        return dataclasses.replace(spec, metrics=tuple(metrics))

    @staticmethod
    def load(path: Path | str, changes: tuple[str, ...] = ()) -> Spec:
        """A spec from a TOML file, with changes such as `method.lr=0.1` applied."""
        return Spec.from_table(with_changes(read_toml(path_of("spec", path)), changes))

    def table(self) -> Table:
        """Nested plain values with all defaults."""
        table: Table = tables.describe(self)
        return table | {"metrics": [_told(one) for one in self.metrics]}

    def toml(self) -> str:
        """`table` as TOML text."""
        return tomli_w.dumps(self.table())

    @property
    def length_decides(self) -> bool:
        """Whether the numbers of a round depend on `rounds`: by a schedule, or by noise for an ε of the whole run."""
        return self.method.spans_run or (self.dp is not None and self.dp.epsilon is not None)

    def decisions(self) -> Table:
        """The settings that decide the numbers, where they differ from their defaults."""
        table = changed(self)
        for name in UNDECIDED:
            if not (name == "rounds" and self.length_decides):
                table.pop(name, None)
        table.pop("callbacks", None)
        deciding = [tables.describe(one) for one in self.callbacks if one.decides]
        return table | ({"callbacks": deciding} if deciding else {})

    def identity(self) -> str:
        """A short hash of `decisions`: runs of one identity differ in their seed and length alone."""
        return digest(json.dumps(_ordered(self.decisions())))


def _check_place(table: Table) -> None:
    """Refuses a key of the method or the task that stands outside of its table, and says where it belongs."""
    known = {one.name for one in dataclasses.fields(Spec)}
    for kind in ("method", "task"):
        given = table.get(kind)
        cls = (
            registry.choices(kind).get(str(given.get("name")))
            if isinstance(given, Mapping)
            else None
        )
        inside = {one.name for one in dataclasses.fields(cls)} if cls is not None else set()
        for key in table:
            if key in inside - known:
                raise SpecError(f"`[spec]` has no key {shown(key)}; it is `{kind}.{key}`")


def _told(metric: Any) -> Any:
    """A metric's name; of a class, an object or a function also what it is, and whether more of it is better."""
    if isinstance(metric, str):
        return metric
    higher = direction_of(metric)
    said = {} if higher is None else {"higher_is_better": higher}
    return {"name": column_of(metric), "source": source_of(metric)} | said


def changed(value: Any) -> Table:
    """A dataclass as a table of the values that differ from their defaults."""
    if isinstance(value, Task) and (given := value.given()) is not None:
        return given
    table: Table = {"name": registry.name_of(value)} if registry.is_registered(value) else {}
    for one in dataclasses.fields(value):
        default = (
            one.default_factory() if one.default_factory is not dataclasses.MISSING else one.default
        )
        inner = getattr(value, one.name)
        if one.init and inner != default:
            table[one.name] = (
                changed(inner) if dataclasses.is_dataclass(inner) else tables.describe(inner)
            )
    if isinstance(value, Task):
        table = {
            name: inner
            for name, inner in (table | value.fingerprint()).items()
            if inner is not None
        }
    return table


def read_toml(path: Path) -> Table:
    """The table of a spec file. The data files and modules that its tasks name are relative to its directory."""
    if path.is_dir():
        raise SpecError(f"{str(path)!r} is a directory; give the spec file in it")
    if not path.is_file():
        raise SpecError(f"spec file {str(path)!r} does not exist")
    try:
        table: Table = _anchored(tomllib.loads(path.read_text("utf-8")), path.resolve().parent)
    except (
        ValueError,
        RecursionError,
    ) as error:  # not TOML, not text, a number of thousands of digits, deep nesting
        raise SpecError(f"spec file {str(path)!r} is not TOML: {one_line(str(error))}") from None
    except OSError as error:
        raise SpecError(f"spec file {str(path)!r} cannot be read: {error.strerror}") from None
    _no_dates(table)
    return table


def _no_dates(value: Any, key: str = "") -> None:
    """Refuses the dates and times of TOML, which no setting is."""
    if isinstance(value, datetime.date | datetime.time):
        raise SpecError(
            f"`{key}` is a date or a time ({value}), which no setting takes; put text in quotes"
        )
    for name, inner in (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    ):
        _no_dates(inner, f"{key}.{name}" if key else str(name))


def _anchored(value: Any, folder: Path, key: str = "") -> Any:
    """A table in which every task's paths are absolute and its module has the directory to be looked for in."""
    if isinstance(value, list):
        return [_anchored(inner, folder) for inner in value]
    if not isinstance(value, dict):
        return value
    table = {name: _anchored(inner, folder, name) for name, inner in value.items()}
    if key == "task":
        if isinstance(table.get("data"), dict):
            paths = {
                k: str(folder / v)
                for k, v in table["data"].items()
                if k in PATHS and isinstance(v, str)
            }
            table["data"] |= paths
        elif table.get("name") == "regression" and isinstance(table.get("data"), str):
            table["data"] = str(folder / table["data"])
        if "module" in table or ":" in str(table.get("model", "")):
            table.setdefault("module_dir", str(folder))
    return table


def with_changes(table: Table, changes: tuple[str, ...]) -> Table:
    """The table with settings such as `a.b=value`; values are TOML, or else text."""
    values: Table = {}
    for change in changes:
        key, sign, text = change.partition("=")
        if not sign or not key:
            raise SpecError(f"a change of a spec is written key=value, got {shown(change)}")
        values[key.strip()] = toml_value(text)
    for key, value in values.items():
        if key.endswith(".name"):
            table = _renamed(table, key, value)
    return with_values(table, values)


def _renamed(table: Table, key: str, name: Any) -> Table:
    """The table without settings that another choice at `key` does not share with the one before; they are named."""
    where = key.removesuffix(".name")
    *_, field = where.split(".")
    kind = {"space": "projector", "local": "optimizer"}.get(field, field)
    before: Any = table
    for part in where.split("."):
        before = before.get(part, {}) if isinstance(before, Mapping) else {}
    if kind not in registry.KINDS or not isinstance(before, Mapping) or not isinstance(name, str):
        return table
    kept = _shared(kind, before, name)
    if dropped := [one for one in before if one not in kept]:
        warnings.warn(
            f"{key}={name} drops {', '.join(dropped)} of the {kind} {before['name']!r}",
            stacklevel=4,
        )
        table = with_values(table, {where: kept})
    return table


def _shared(kind: str, table: Mapping[str, Any], name: str) -> Table:
    """The keys of a table that mean the same for another choice: both classes inherit the field from one class."""
    known = registry.accepted(kind)
    old, new = known.get(table.get("name", "")), known.get(name)
    if old is None or new is None or old is new:
        return dict(table)
    kept = {f.name for f in dataclasses.fields(new) if _origin(new, f.name) is _origin(old, f.name)}
    return {key: value for key, value in table.items() if key in kept or key == "name"}


def _origin(cls: type, field: str) -> type | None:
    """The class at the top that first has a field."""
    owners = [base for base in cls.__mro__ if field in inspect.get_annotations(base)]
    return owners[-1] if owners else None


def toml_value(text: str) -> Any:
    """A value as TOML has it, or else the text itself."""
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    _no_dates(table)
    if len(table) > 1:
        raise SpecError(
            f"one setting per change, got {one_line(text)!r}; give another --set for the next"
        )
    return table["value"]


def with_values(table: Mapping[str, Any], values: Mapping[str, Any]) -> Table:
    """The table with values at dotted keys."""
    found: Table = json.loads(json.dumps(table))
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
        found |= (
            flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
        )
    return found


def _ordered(value: Any, key: str = "") -> Any:
    """Fields in the order of their names; the patterns of a `rank` in the order in which they are tried."""
    if isinstance(value, Mapping):
        pairs = [[name, _ordered(inner, name)] for name, inner in value.items()]
        return pairs if key == "rank" else sorted(pairs, key=lambda pair: pair[0])
    return [_ordered(inner) for inner in value] if isinstance(value, list) else value
