"""A run as text: Spec ⇄ TOML, and `run`, which carries it out into a folder that can be resumed.

spec.toml  →  build  →  loop  →  history.jsonl, checkpoint.safetensors, model.safetensors, clients.csv

A spec whose `method.lr` is "auto" (the corollary's step) or "search" is settled first: the number that is found stands
in the run's spec.toml, and how it was found in lr.json.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fedspan.core import registry
from fedspan.core.checkpoint import write_atomic
from fedspan.core.errors import SpecError, at_least, positive
from fedspan.core.layout import DTYPES, Layout
from fedspan.core.method import Method
from fedspan.core.objective import Problem
from fedspan.core.task import Task, Weights
from fedspan.runtimes.folder import CHECKPOINT, Result, carry_out, toml, vacant
from fedspan.runtimes.history import Line
from fedspan.runtimes.loop import Loop, Row, over_epochs
from fedspan.runtimes.plan import Cost, cost
from fedspan.runtimes.simulator import Simulate, Simulator
from fedspan.theory.diagnosis import Diagnosis, auto, diagnose
from fedspan.theory.live import observe
from fedspan.theory.search import Search, search

FOUND = "lr.json"  # how the local step was found, in a run's folder
UNSETTLED = 1.0  # stands in for a local step that has yet to be found


@dataclass(frozen=True, kw_only=True)
class Participation:
    """Who takes part in a round, and with what weight."""

    per_round: int | None = None  # None: all clients
    weights: Weights = "uniform"

    def __post_init__(self) -> None:
        if self.per_round is not None:
            at_least("participation.per_round", self.per_round, 1)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Everything that decides a run's numbers."""

    rounds: int
    method: Method[Any, Any, Any, Any]
    task: Task
    seed: int = 0
    eval_every: int = 100
    epochs: float | None = None  # local steps as passes over the mean client's examples, instead of method.local_steps
    dtype: Literal["float32", "float64"] = "float32"
    participation: Participation = field(default_factory=Participation)
    diagnostics: bool = False  # control error, drift and gradient norm in every row
    lr_from: Literal["auto", "search"] | None = None  # set by a `method.lr` of that name; None: lr is a number
    search: Search = field(default_factory=Search)

    def __post_init__(self) -> None:
        at_least("rounds", self.rounds, 1)
        at_least("eval_every", self.eval_every, 1)
        if self.epochs is not None:
            positive("epochs", self.epochs)
        at_least("seed", self.seed, 0)
        if self.seed >= 2**64:
            raise SpecError(f"`seed` must be below 2**64, got {self.seed}")

    @staticmethod
    def from_table(table: dict[str, Any]) -> Spec:
        """A spec from nested plain values, each key and type checked."""
        method = table.get("method")
        if isinstance(method, dict) and method.get("lr") in ("auto", "search"):
            table = table | {"method": method | {"lr": UNSETTLED}, "lr_from": method["lr"]}
        spec = registry.make(Spec, table, "spec")
        assert isinstance(spec, Spec)
        return spec

    @staticmethod
    def load(path: Path, changes: tuple[str, ...] = ()) -> Spec:
        """A spec from a TOML file, with changes such as `method.lr=0.1` applied."""
        if not path.is_file():
            raise SpecError(f"spec file {str(path)!r} does not exist")
        try:
            table = tomllib.loads(path.read_text())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SpecError(f"spec file {str(path)!r} is not TOML: {error}") from None
        return Spec.from_table(with_changes(table, changes))

    def table(self) -> dict[str, Any]:
        """Nested plain values, defaults filled in; `from_table` of it is this spec."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) is not None}
        sharing = {k: v for k, v in dataclasses.asdict(self.participation).items() if v is not None}
        described = {"method": registry.describe(self.method), "task": registry.describe(self.task)}
        plain.pop("lr_from", None)
        del plain["search"]
        if not self.diagnostics:
            del plain["diagnostics"]
        if self.lr_from is not None:
            described["method"]["lr"] = self.lr_from
        if self.lr_from == "search":
            described["search"] = dataclasses.asdict(self.search)
        return plain | described | {"participation": sharing}

    def settled(self) -> Spec:
        """Itself, with a number for its local step; refused where that has yet to be found."""
        if self.lr_from is not None:
            raise SpecError(
                f"`method.lr` is {self.lr_from!r}; `fedspan run` finds the number and writes it to spec.toml: use that"
            )
        return self

    def toml(self) -> str:
        """The same as TOML text."""
        return toml(self.table())


def with_changes(table: dict[str, Any], changes: tuple[str, ...]) -> dict[str, Any]:
    """The table with `a.b=value` settings put in; values are TOML, or else taken as text."""
    values: dict[str, Any] = {}
    for change in changes:
        path, sign, text = change.partition("=")
        if not sign or not path:
            raise SpecError(f"--set needs key=value, got {change!r}")
        try:
            values[path.strip()] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            values[path.strip()] = text
    return with_values(table, values)


def with_values(table: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The table with values put in by dotted keys."""
    table = json.loads(json.dumps(table))
    for path, value in values.items():
        *parents, last = path.split(".")
        inner = table
        for parent in parents:
            inner = inner.setdefault(parent, {})
            if not isinstance(inner, dict):
                raise SpecError(f"cannot set {path!r}: {parent!r} is a value, not a table")
        inner[last] = value
    return table


def run(
    spec: Spec,
    out: Path,
    *,
    seeds: int = 1,
    resume: bool = False,
    simulate: Simulate = "loop",
    trail: bool = False,
    on_row: Callable[[Row], None] | None = None,
) -> Result:
    """Carry out a spec in `out`; several seeds in `out/seed-*`, as one batched computation where the task can."""
    at_least("seeds", seeds, 1)
    spec = settle(spec, out, resume=resume)
    of_runs = tuple(range(spec.seed, spec.seed + seeds))
    if seeds == 1 or spec.task.several_seeds:
        return _run(spec, out, of_runs, resume, simulate, trail, on_row)
    rows: list[list[Line]] = []
    finished = True
    for seed in of_runs:
        folder = out / f"seed-{seed}"
        again = resume and (folder / CHECKPOINT).exists()
        one = _run(dataclasses.replace(spec, seed=seed), folder, (seed,), again, simulate, trail, on_row)
        rows, finished = [*rows, *one.rows], one.finished
        if not finished:
            break
    return Result(of_runs[: len(rows)], rows, finished)


def _run(
    spec: Spec,
    out: Path,
    of_runs: tuple[int, ...],
    resume: bool,
    simulate: Simulate,
    trail: bool,
    on_row: Callable[[Row], None] | None,
) -> Result:
    problem = spec.task.build(of_runs, DTYPES[spec.dtype], spec.participation.weights)
    per_round = spec.participation.per_round or problem.clients
    method = over_epochs(spec.method, problem, spec.epochs)
    with Simulator(method, problem, simulate=simulate, rounds=spec.rounds, trail=trail) as clients:
        loop = Loop(method, problem, clients, of_runs, per_round, observe=observe if spec.diagnostics else None)
        return carry_out(loop, spec.table(), out, resume=resume, on_row=on_row)


def settle(spec: Spec, out: Path, *, resume: bool = False) -> Spec:
    """The spec with a number for its local step. A run that is resumed goes on with the one it was begun with."""
    if spec.lr_from is None:
        return spec
    path = out / FOUND
    if not (resume and path.exists()):
        vacant(out)
        found = _find(spec)
        out.mkdir(parents=True, exist_ok=True)
        write_atomic(path, (json.dumps(found, indent=1) + "\n").encode())
    values = json.loads(path.read_text())["values"]
    return dataclasses.replace(spec, method=dataclasses.replace(spec.method, **values), lr_from=None)  # type: ignore[type-var]


def _find(spec: Spec) -> dict[str, Any]:
    """The local step by the spec's rule, on its first seed."""
    method, problem, per_round = _parts(spec)
    if spec.lr_from == "auto":
        lr, server_lr = auto(method, problem, per_round, spec.rounds)
        return {"rule": "auto", "values": {"lr": lr, "server_lr": server_lr}}
    found = search(method, problem, per_round, spec.rounds, spec.search)
    trials = [dataclasses.asdict(trial) for trial in found.trials]
    return {"rule": "search", "values": {"lr": found.lr}, "rounds": found.rounds, "trials": trials}


def check(spec: Spec, target: float | None = None) -> Diagnosis:
    """What the theory says about a spec before it runs; one without a local step is shown the corollary's."""
    method, problem, per_round = _parts(spec)
    if spec.lr_from is not None:
        lr, server_lr = auto(method, problem, per_round, spec.rounds)
        method = dataclasses.replace(method, lr=lr, server_lr=server_lr)  # type: ignore[type-var]
    return diagnose(method, problem, per_round, spec.rounds, target)


def _parts(spec: Spec) -> tuple[Method[Any, Any, Any, Any], Problem, int]:
    """Method, problem of the first seed, and S."""
    problem = spec.task.build((spec.seed,), DTYPES[spec.dtype], spec.participation.weights)
    method = over_epochs(spec.method, problem, spec.epochs)
    method.check(problem.layout)
    return method, problem, spec.participation.per_round or problem.clients


def plan(spec: Spec) -> tuple[Layout, dict[str, Cost]]:
    """The model, and what each registered method would cost on it under the spec's steps and subspace."""
    problem = spec.task.centre((spec.seed,), DTYPES[spec.dtype], spec.participation.weights)
    per_round = spec.participation.per_round or problem.clients
    own = registry.describe(spec.method)
    costs = {}
    for name, kind in registry.choices("method").items():
        known = {field.name for field in dataclasses.fields(kind)}
        shared: dict[str, Any] = {key: own[key] for key in ("lr", "local_steps", "momentum") if key in own}
        if "projector" in known:
            shared["projector"] = own.get("projector", {"name": "coordinate", "rank": 0.1})
        method = spec.method if name == own["name"] else registry.build("method", {"name": name} | shared)
        method.check(problem.layout)
        costs[name] = cost(method, problem, per_round, spec.rounds, spec.seed)
    return problem.layout, costs
