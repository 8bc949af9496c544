"""A run as text: Spec ⇄ TOML, and `run`, which carries it out into a folder that can be resumed.

spec.toml  →  build  →  loop  →  history.jsonl, checkpoint.safetensors, model.safetensors, clients.csv

A spec whose `method.lr` is "auto" (the corollary's step) or "search" is settled first: the number that is found stands
in the run's spec.toml, and how it was found in lr.json.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fedspan.callbacks import loggers
from fedspan.core import registry
from fedspan.core.checkpoint import write_atomic
from fedspan.core.errors import SpecError, at_least, one_of, positive
from fedspan.core.layout import DTYPES, Layout
from fedspan.core.method import Method
from fedspan.core.objective import Problem
from fedspan.core.task import Task, Weights
from fedspan.costs.sketch import Sketch, sketched
from fedspan.costs.traffic import Cost, FlatProblem, cost
from fedspan.engine.history import Line
from fedspan.engine.loop import Loop, Row, over_epochs
from fedspan.engine.run_dir import CHECKPOINT, Result, execute, toml, vacant
from fedspan.engine.simulator import Simulate, Simulator
from fedspan.nn.problem import TorchProblem
from fedspan.theory.diagnosis import Diagnosis, auto, diagnose
from fedspan.theory.diagnostics import observe
from fedspan.theory.lr_search import Search, search

FOUND = "lr.json"  # how the local step was found, in a run's folder
UNSETTLED = 1.0  # stands in for a local step that has yet to be found

SHARED = ("lr", "local_steps", "schedule", "schedule_rounds")  # what methods take from another


@dataclass(frozen=True, kw_only=True)
class Participation:
    """Who takes part in a round, and with what weight."""

    clients_per_round: int | None = None  # None: all clients
    weights: Weights = "uniform"

    def __post_init__(self) -> None:
        if self.clients_per_round is not None:
            at_least("participation.clients_per_round", self.clients_per_round, 1)


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
        spec = registry.make(Spec, table)
        assert isinstance(spec, Spec)
        return spec

    @staticmethod
    def load(path: Path, changes: tuple[str, ...] = ()) -> Spec:
        """A spec from a TOML file, with changes such as `method.lr=0.1` applied."""
        return Spec.from_table(with_changes(read_toml(path), changes))

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


def read_toml(path: Path) -> dict[str, Any]:
    """The table of a spec file."""
    if not path.is_file():
        raise SpecError(f"spec file {str(path)!r} does not exist")
    try:
        return tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"spec file {str(path)!r} is not TOML: {error}") from None


def with_changes(table: dict[str, Any], changes: tuple[str, ...]) -> dict[str, Any]:
    """The table with `a.b=value` settings put in; values are TOML, or else taken as text."""
    values: dict[str, Any] = {}
    for change in changes:
        path, sign, text = change.partition("=")
        if not sign or not path:
            raise SpecError(f"--set needs key=value, got {change!r}")
        values[path.strip()] = plain_value(text)
    return with_values(table, values)


def plain_value(text: str) -> Any:
    """A value as TOML has it, or else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


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
    compact_states: bool = False,
    on_row: Callable[[Row], None] | None = None,
    log: Sequence[str] = (),
) -> Result:
    """Carry out a spec in `out`; several seeds in `out/seed-*`, as one batched computation where the task can.

    `on_row` is called with every row as it comes; `log` names loggers that are given them too.
    """
    at_least("seeds", seeds, 1)
    loggers.check(log)
    spec = settle(spec, out, resume=resume)
    of_runs = tuple(range(spec.seed, spec.seed + seeds))
    if seeds == 1 or spec.task.several_seeds:
        return _run(spec, out, of_runs, resume, simulate, compact_states, on_row, log)
    rows: list[list[Line]] = []
    finished = True
    for seed in of_runs:
        folder = out / f"seed-{seed}"
        again = resume and (folder / CHECKPOINT).exists()
        one = _run(dataclasses.replace(spec, seed=seed), folder, (seed,), again, simulate, compact_states, on_row, log)
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
    compact_states: bool,
    on_row: Callable[[Row], None] | None,
    log: Sequence[str],
) -> Result:
    problem = spec.task.build(of_runs, DTYPES[spec.dtype], spec.participation.weights)
    clients_per_round = spec.participation.clients_per_round or problem.clients
    method = over_epochs(spec.method, problem, spec.epochs)
    with Simulator(method, problem, simulate=simulate, rounds=spec.rounds, compact_states=compact_states) as clients:
        loop = Loop(method, problem, clients, of_runs, clients_per_round, observe=observe if spec.diagnostics else None)
        with loggers.every(log, out, spec.table(), of_runs, on_row) as seen:
            return execute(loop, spec.table(), out, resume=resume, on_row=seen)


def sibling(spec: Spec, name: str, rank: float | None = None) -> dict[str, Any]:
    """The table of method NAME with what it can take of the spec's steps, subspace and compressor.

    `rank` is that of a subspace where the spec has none.
    """
    own = registry.describe(spec.method)
    one_of("method", name, registry.choices("method"))
    if name == own["name"]:
        return own
    known = {field.name for field in dataclasses.fields(registry.choices("method")[name])}
    usual = own.get("projector", {"name": "coordinate", "rank": own.get("rank", rank)})
    subspace = {"projector": usual} if "projector" in known else {"rank": usual.get("rank")}
    table = {"name": name} | {key: own[key] for key in SHARED if key in own and key in known}
    if "rank" in known and None not in (usual.get("rank"), *subspace.values()):
        table |= subspace
    for key in ("momentum", "optimizer", "moments", "compressor"):  # which some methods refuse
        if key in own and key in known:
            with contextlib.suppress(SpecError):
                registry.build("method", table | {key: own[key]}).check(_outline(_task_of(spec)).layout)
                table |= {key: own[key]}
    return table


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
    method, problem, clients_per_round = _parts(spec)
    if spec.lr_from == "auto":
        lr, server_lr = auto(method, problem, clients_per_round, spec.rounds)
        return {"rule": "auto", "values": {"lr": lr, "server_lr": server_lr}}
    found = search(method, problem, clients_per_round, spec.rounds, spec.search)
    trials = [dataclasses.asdict(trial) for trial in found.trials]
    return {"rule": "search", "values": {"lr": found.lr}, "rounds": found.rounds, "trials": trials}


def examine(spec: Spec, target: float | None = None) -> Diagnosis:
    """What the theory says about a spec before it runs; one without a local step is shown the corollary's."""
    method, problem, clients_per_round = _parts(spec)
    if spec.lr_from is not None:
        lr, server_lr = auto(method, problem, clients_per_round, spec.rounds)
        method = dataclasses.replace(method, lr=lr, server_lr=server_lr)  # type: ignore[type-var]
    return diagnose(method, problem, clients_per_round, spec.rounds, target)


def _parts(spec: Spec) -> tuple[Method[Any, Any, Any, Any], Problem, int]:
    """Method, problem of the first seed, and S."""
    problem = spec.task.build((spec.seed,), DTYPES[spec.dtype], spec.participation.weights)
    method = over_epochs(spec.method, problem, spec.epochs)
    method.check(problem.layout)
    return method, problem, spec.participation.clients_per_round or problem.clients


def plan(spec: Spec) -> tuple[Layout, dict[str, Cost]]:
    """The model, and what each registered method would cost on it under the spec's steps, subspace and compressor."""
    problem = spec.task.server_problem((spec.seed,), DTYPES[spec.dtype], spec.participation.weights)
    costs = {}
    for name in registry.choices("method"):
        costs[name] = _cost(spec, registry.build("method", sibling(spec, name, rank=0.1)), problem)
    return problem.layout, costs


def price(spec: Spec) -> Cost:
    """What the spec itself will cost."""
    return _cost(spec, spec.method, _outline(_task_of(spec)))


def sketch(spec: Spec) -> Sketch | None:
    """The task's network without numbers; None where the problem is not a network."""
    return _network(_task_of(spec))


def check(spec: Spec) -> None:
    """Refuse a method that cannot work on the task's model."""
    spec.method.check(_outline(_task_of(spec)).layout)


def _task_of(spec: Spec) -> str:
    return json.dumps(
        {key: value for key, value in spec.table().items() if key in ("task", "seed", "dtype", "participation")},
        sort_keys=True,
    )


def _any(told: str) -> Spec:
    return Spec.from_table({"rounds": 1, "method": {"name": "fedavg", "lr": 1.0}} | json.loads(told))


@functools.lru_cache(maxsize=8)
def _outline(told: str) -> Problem:
    """A task's model and number of clients; its data is let go again."""
    spec = _any(told)
    problem = spec.task.server_problem((spec.seed,), DTYPES[spec.dtype], spec.participation.weights)
    return FlatProblem(problem.layout, problem.x0[:1].clone(), problem.clients)


@functools.lru_cache(maxsize=8)
def _network(told: str) -> Sketch | None:
    """A task's network and the largest batch of any client, without numbers."""
    spec = _any(told)
    problem = spec.task.build((spec.seed,), DTYPES[spec.dtype])
    return sketched(problem) if isinstance(problem, TorchProblem) else None


def metrics(spec: Spec) -> list[str]:
    """The metrics that a run of the spec will report."""
    problem = spec.task.server_problem((spec.seed,), DTYPES[spec.dtype], spec.participation.weights)
    return list(problem.evaluate(problem.x0, problem.buffers0))


def _cost(spec: Spec, method: Method[Any, Any, Any, Any], problem: Problem) -> Cost:
    method.check(problem.layout)
    return cost(method, problem, spec.participation.clients_per_round or problem.clients, spec.rounds, spec.seed)
