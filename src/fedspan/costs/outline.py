"""What a spec's run will cost: a task is built once, for all specs that differ in method, steps and length alone."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from fedspan.core import building, registry
from fedspan.core.config import Participation
from fedspan.core.errors import DataError, FedspanError, SpecError
from fedspan.core.objective import Problem
from fedspan.core.spec import Spec
from fedspan.costs.memory import Memory, memory
from fedspan.costs.process import client_peak
from fedspan.costs.sketch import Sketch, sketched
from fedspan.costs.traffic import AnyMethod, Cost, FlatProblem, cost
from fedspan.methods.base import InSubspace
from fedspan.nn.problem import TorchProblem

SHARED = (
    "lr",
    "local_steps",
    "schedule",
    "warmup",
    "milestones",
    "gamma",
)  # settings that one method takes from another
MODEL = ("task", "seed", "dtype", "batch_size", "training", "participation", "projection", "engine")
KEPT = 8  # outlines of different models
CANNOT_REHEARSE = (
    FedspanError,
    ImportError,
    RuntimeError,
    ValueError,
    TypeError,
)  # such as an adapter PEFT lacks


@dataclass(frozen=True, eq=False)
class Outline:
    """A task without its data and numbers."""

    problem: FlatProblem
    parameters: int  # numbers of the model, trained or not
    sketch: Sketch | None  # None: not a network, or no client's data is here
    test_examples: int | None = None  # None: not a network, or without a test set
    weighted: bool = False  # whether clients have different weights


_outlines: dict[str, Outline] = {}


def outline(spec: Spec) -> Outline:
    """The spec's model and number of clients; its data is let go again."""
    table = spec.table()
    key = json.dumps({name: table[name] for name in MODEL}, sort_keys=True)
    if key not in _outlines:
        while len(_outlines) >= KEPT:
            _outlines.pop(next(iter(_outlines)))
        _outlines[key] = _outline(spec)
    return _outlines[key]


def _outline(spec: Spec) -> Outline:
    problem = _built(spec)
    buffers = 0 if problem.buffers0 is None else problem.buffers0.shape[-1]
    flat = FlatProblem(problem.layout, problem.clients, buffers)
    if not isinstance(problem, TorchProblem):
        return Outline(flat, flat.layout.size, None, weighted=problem.weights is not None)
    parameters = sum(p.numel() for p in problem.model.parameters())
    return Outline(
        flat, parameters, sketched(problem), problem.test_examples, problem.weights is not None
    )


def _built(spec: Spec) -> Problem:
    """With the clients' data, which memory depends on, or without where they are elsewhere."""
    try:
        return spec.task.build((spec.seed,), spec)
    except DataError:
        return _without_clients(spec)


def _without_clients(spec: Spec) -> Problem:
    """As a server has it; what is asked of it here does not depend on the clients' weights."""
    alike = dataclasses.replace(spec, participation=Participation(weights="uniform"))
    return spec.task.server_problem((spec.seed,), alike)


def price(spec: Spec) -> Cost:
    """Bytes of the spec's run."""
    problem = outline(spec).problem
    per_round, known_start = (
        spec.clients_per_round or problem.clients,
        spec.participation.known_start,
    )
    return cost(spec.method, problem, per_round, spec.rounds, spec.seed, known_start=known_start)


def projected(spec: Spec) -> tuple[int, int, int] | None:
    """Parameters that a method projects, values that a client sends, and parameters that are trained.

    None for a method without a subspace.
    """
    layout = outline(spec).problem.layout
    return spec.method.projected(layout) if isinstance(spec.method, InSubspace) else None


def keeps_objective(spec: Spec) -> bool:
    """Whether a run minimizes the weighted objective; sampling can bias it: see `Participation.unbiased`."""
    known = outline(spec)
    everyone = (spec.clients_per_round or known.problem.clients) == known.problem.clients
    return (
        everyone or not known.weighted or spec.participation.unbiased or spec.method.follows_states
    )


def check(spec: Spec) -> None:
    """Raise SpecError if the method cannot work on the task's model."""
    spec.method.check(outline(spec).problem.layout)


def metrics(spec: Spec) -> tuple[list[str], bool]:
    """The metrics that a run of the spec reports, and whether its task has a training loss."""
    problem = _built(spec)
    trains = type(problem).training_loss is not Problem.training_loss
    return list(problem.evaluate(problem.x0, problem.buffers0)), trains


_peaks: dict[str, int | None] = {}


def client_memory(given: Spec | dict[str, Any]) -> int | None:
    """Bytes in a client's memory at the peak of a local step of a spec; None where they are not known."""
    try:
        spec = given if isinstance(given, Spec) else Spec.from_table(given)
    except (FedspanError, OSError, ImportError):  # of a method, a task or objects that are not here
        return None
    method = dataclasses.replace(spec.method, lr=1.0, local_steps=1)  # type: ignore[type-var]
    alike = dataclasses.replace(
        spec, rounds=1, eval_every=1, epochs=None, callbacks=(), method=method
    )
    key = json.dumps(alike.table())  # of the ranks by layer the first that matches counts: unsorted
    if key not in _peaks:
        _peaks[key] = _peak(alike)
    return _peaks[key]


def _peak(spec: Spec) -> int | None:
    try:
        found = rehearsed(spec.method, outline(spec).sketch)
    except (FedspanError, OSError, ImportError):  # data that is not here
        return None
    return None if found is None else found.peak


def rehearsed(method: AnyMethod, sketch: Sketch | None) -> Memory | None:
    """The memory of a local step; None where there is no network, or it does not run without numbers."""
    try:
        return None if sketch is None else memory(method, sketch)
    except CANNOT_REHEARSE:
        return None


def client_process(method: AnyMethod, sketch: Sketch | None, lag: int) -> int | None:
    """Bytes at the peak of a client's process that takes part in every `lag`-th round; None as for `rehearsed`."""
    try:
        return None if sketch is None else client_peak(method, sketch, lag)
    except CANNOT_REHEARSE:
        return None


def sibling(spec: Spec, name: str, rank: float | None = None) -> dict[str, Any]:
    """The table of method `name` with what it can take of the spec's steps, subspace and compressor.

    `rank` is that of a subspace where the spec has none.
    """
    own: dict[str, Any] = building.describe(spec.method)
    name = registry.registered_name("method", name, "method")
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
                building.build("method", table | {key: own[key]}).check(
                    outline(spec).problem.layout
                )
                table |= {key: own[key]}
    return table
