"""`plan`: what each method will cost on a spec's task, or on a Hugging Face model that is not even downloaded.

A task's data is read once, for all specs that differ in method, steps and length alone, and let go again: `shapes`.
"""

import bisect
import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedspan.core import registry, tables
from fedspan.core.config import Participation
from fedspan.core.errors import DataError, FedspanError, SpecError, at_least, items, one_of, path_of
from fedspan.core.layout import Layout
from fedspan.core.method import Footprint, Method
from fedspan.core.objective import Problem
from fedspan.core.spec import Spec
from fedspan.costs.memory import Memory, client_peak, dry_problem, memory
from fedspan.costs.traffic import Cost, FlatProblem, cost
from fedspan.engine.clock import Clock
from fedspan.nn.problem import TorchProblem
from fedspan.projectors.identity import Identity
from fedspan.tasks.outline import Outline

RANK = 0.1  # of a subspace where a spec has none
COMPARED = ("ssf", "fedit", "ffalora", "fedavg", "scaffold")  # methods planned for an outline
FINE = 2**20  # shares of a layer's inputs that are told apart
KEPT_SHAPES = 8  # of different models
# Settings that one method takes from another, and those that decide the shapes of a model.
SHARED = ("lr", "local_steps", "schedule", "warmup")
DECIDING = (
    "task", "seed", "dtype", "batch_size", "training", "participation", "projection", "engine",
)  # fmt: skip
# Errors of a network that does not run without values, or of an adapter that PEFT does not have.
CANNOT_REHEARSE = (FedspanError, ImportError, RuntimeError, ValueError, TypeError)
NOT_HERE = (FedspanError, OSError, ImportError)  # a method, a task, objects or data


@dataclass(frozen=True)
class MethodPlan:
    """What one method costs."""

    method: str
    rank: Any  # of its subspace or adapters; None: it has neither
    trained: int  # values that a local step trains
    cost: Cost
    memory: Memory | None  # of one client; None: not a network, or it does not run without values
    client_peak: int | None  # bytes of a client's process, besides Python, torch and Flower


@dataclass(frozen=True)
class Plan:
    """What each method costs on one model."""

    parameters: int  # of the model, trained or not
    layout: Layout  # of what is trained
    clients: int
    clients_per_round: int
    rounds: int
    rows: tuple[MethodPlan, ...]

    def __getitem__(self, method: str) -> MethodPlan:
        one_of("method", method, [row.method for row in self.rows])
        return next(row for row in self.rows if row.method == method)


def plan(
    source: Spec | Path | str | Mapping[str, Any],
    methods: Sequence[str] | None = None,
    *,
    trained: int | None = None,
) -> Plan:
    """Plan bytes, memory and disk of a run, without running it.

    Args:
        source: A `Spec`, the path of a TOML file or a table of plain values. With the task `outline`, of a Hugging
            Face model only its config.json is read.
        methods: Names of the methods to plan. By default all that are registered, and for the task `outline` those
            that are compared most: SSF, LoRA (`fedit`), FFA-LoRA, FedAvg and SCAFFOLD.
        trained: Number of values that all methods with a rank train, as nearly as they can. By default they
            take the spec's rank; for the task `outline` they train as many values as the spec's own method.

    Returns:
        A row per method. All take the spec's steps, subspace and compressor as far as they can.
    """
    if methods is not None:
        names = items("methods", methods)
        if not names:
            raise SpecError("`methods` is empty; name at least one method, or leave it out for all")
        methods = [registry.registered_name("method", name, "methods") for name in names]
    if isinstance(source, Mapping):
        source = Spec.from_table(source)
    spec = source if isinstance(source, Spec) else Spec.load(path_of("source", source))
    if trained is not None:
        at_least("trained", trained, 1)
    known, outlined = shapes(spec), isinstance(spec.task, Outline)
    layout, clients = known.problem.layout, known.problem.clients
    cohort = spec.clients_per_round or clients
    wanted = trained or (spec.method.footprint(layout).trained if outlined else None)
    rows = []
    for name in methods or (COMPARED if outlined else registry.choices("method")):
        table = sibling(spec, name, RANK)
        if wanted is not None and (trained is not None or name != registry.name_of(spec.method)):
            table = matched(table, layout, wanted)
        method = tables.build("method", table)
        peak = _rehearsed(client_peak, method, known.dry, max(1, clients // cohort))
        if peak is not None and spec.participation.known_start:  # the initial weights stay
            peak += layout.size * layout.dtype.itemsize
        space = getattr(method, "space", method)
        row = MethodPlan(
            method=name,
            rank=None if isinstance(space, Identity) else getattr(space, "rank", None),
            trained=method.footprint(layout).trained,
            cost=price(spec, method),
            memory=_rehearsed(memory, method, known.dry),
            client_peak=peak,
        )
        rows.append(row)
    return Plan(known.parameters, layout, clients, cohort, spec.rounds, tuple(rows))


def _rehearsed(look: Any, method: Method, problem: TorchProblem | None, *given: int) -> Any:
    """What `look` finds; None where there is no network, or it does not run without values."""
    try:
        return None if problem is None else look(method, problem, *given)
    except CANNOT_REHEARSE:
        return None


# --- The shapes of a spec's task, and what follows from them ---


@dataclass(frozen=True, eq=False)
class Shapes:
    """A task without its data and values."""

    problem: FlatProblem
    parameters: int  # of the model, trained or not
    dry: TorchProblem | None  # None: not a network, or no client's data is here
    weighted: bool  # whether clients have different weights
    peaks: dict[str, int | None] = field(default_factory=dict)  # method → `client_memory`


_shapes: dict[str, Shapes] = {}


def shapes(spec: Spec) -> Shapes:
    """Return the spec's model and number of clients; its data is let go again."""
    table = spec.table()
    key = json.dumps({name: table[name] for name in DECIDING}, sort_keys=True)
    if key in _shapes:
        return _shapes[key]
    while len(_shapes) >= KEPT_SHAPES:
        _shapes.pop(next(iter(_shapes)))
    problem = spec.task.shapes(spec) if isinstance(spec.task, Outline) else _built(spec)
    parameters, dry = problem.layout.size, None
    if isinstance(problem, TorchProblem):
        parameters = sum(p.numel() for p in problem.model.parameters())
        # A module may hold what cannot be copied, such as an open file or a tensor that was computed.
        with contextlib.suppress(RuntimeError, TypeError):
            dry = dry_problem(problem) if problem.local_data else None
    flat = FlatProblem.of(problem)
    flat.names, flat.steps_per_epoch = problem.names, problem.steps_per_epoch
    _shapes[key] = Shapes(flat, parameters, dry, problem.weights is not None)
    return _shapes[key]


def _built(spec: Spec) -> Problem:
    """With the clients' data, which memory depends on, or as a server has it where they are elsewhere."""
    try:
        return spec.task.build((spec.seed,), spec)
    except DataError:  # nothing here depends on the clients' weights
        alike = dataclasses.replace(spec, participation=Participation(weights="uniform"))
        return spec.task.server_problem((spec.seed,), alike)


def price(spec: Spec, method: Method | None = None) -> Cost:
    """Return the bytes of a spec's run, or of one with a method that the spec itself may refuse."""
    problem, method = shapes(spec).problem, method or spec.method
    per_round = spec.clients_per_round or problem.clients
    clock = None
    if spec.federation is not None:
        steps = method.local_steps
        if spec.epochs is not None:
            steps = max(1, round(spec.epochs * problem.steps_per_epoch))
        clock = Clock(spec.federation, problem.clients, spec.seed, steps, problem.names)
    known_start = spec.participation.known_start
    own = (method, problem, per_round, spec.rounds, spec.seed)
    return cost(*own, known_start=known_start, clock=clock)


def client_memory(given: Spec | dict[str, Any]) -> int | None:
    """Bytes in a client's memory at the peak of a local step of a spec; None where they are not known."""
    try:
        spec = given if isinstance(given, Spec) else Spec.from_table(given)
        method = dataclasses.replace(spec.method, lr=1.0, local_steps=1)  # type: ignore[type-var]
        # Of the ranks by layer the first that matches counts: unsorted.
        key, known = json.dumps(tables.describe(method)), shapes(spec)
    except NOT_HERE:
        return None
    if key not in known.peaks:
        found: Memory | None = _rehearsed(memory, method, known.dry)
        known.peaks[key] = None if found is None else found.peak
    return known.peaks[key]


def keeps_objective(spec: Spec) -> bool:
    """Whether a run minimizes the weighted objective; sampling can bias it: see `Participation.unbiased`."""
    known = shapes(spec)
    everyone = (spec.clients_per_round or known.problem.clients) == known.problem.clients
    return (
        everyone or not known.weighted or spec.participation.unbiased or spec.method.follows_states
    )


def check(spec: Spec) -> None:
    """Raise SpecError if the method cannot work on the task's model."""
    spec.method.check(shapes(spec).problem.layout)


def metrics(spec: Spec) -> tuple[list[str], bool]:
    """The metrics that a run of the spec reports, and whether its task has a training loss."""
    problem = _built(spec)
    trains = type(problem).training_loss is not Problem.training_loss
    return list(problem.evaluate(problem.x0, problem.buffers0)), trains


# --- Other methods on the same task ---


def sibling(spec: Spec, name: str, rank: float | None = None) -> dict[str, Any]:
    """Return the table of method `name` with what it can take of the spec's steps, subspace and compressor.

    `rank` is that of a subspace where the spec has none.
    """
    own: dict[str, Any] = tables.describe(spec.method)
    name = registry.registered_name("method", name, "method")
    if name == own["name"]:
        return own
    known, theirs = _settings(name), tables.describe(registry.choices("method")[name]())
    table = {"name": name} | {key: own[key] for key in SHARED if key in own and key in known}
    space = own.get("space", {"name": "identity"})
    if space["name"] == "identity":
        space = {"name": "coordinate", "rank": own.get("rank", rank)}
    if "rank" in known and space["rank"] is not None:
        if "space" in known:  # how often P is drawn is the method's own
            table["space"] = space | {"refresh": theirs["space"]["refresh"]}
        else:
            table["rank"] = space["rank"]
    offered = {"local": own.get("local")}
    code = own.get("uplink", {}).get("compressor")
    if code and "compressor" in theirs.get("uplink", {}):
        offered["uplink"] = theirs["uplink"] | {"compressor": code}
    for key, value in offered.items():  # which some methods refuse
        with contextlib.suppress(SpecError):
            tables.build("method", table | {key: value}).check(shapes(spec).problem.layout)
            table |= {key: value}
    return table


def matched(table: dict[str, Any], layout: Layout, wanted: int) -> dict[str, Any]:
    """Return a method's table with the rank at which it trains about the wanted number of values.

    LoRA's adapters are on the layers that SSF projects, and what SSF trains in full LoRA trains in full.
    """
    ranked = [block for block in layout.blocks if block.axis is not None]
    if not ranked:
        raise SpecError(
            "nothing of this model is projected: every large tensor is frozen; freeze less"
        )
    least = _footprint({"name": "ssf", "rank": 1}, layout).trained
    if wanted < least:
        raise SpecError(
            f"`trained` {wanted:,} is too few: rank 1 trains {least:,} here; freeze more"
        )
    if "rank" not in _settings(table["name"]):
        return table
    table = {key: value for key, value in table.items() if key != "rank"}

    def trained(rank: int | float) -> int:
        return _footprint(table | {"rank": rank}, layout).trained

    if trained(1) == trained(1.0):  # PowerSGD's rank is that of messages alone
        return table
    # Ranks are multiples of a unit: of one for adapters, or of a small share of a layer's inputs.
    most, unit = FINE, 1 / FINE
    if _footprint(table | {"rank": 1}, layout).ranks is not None:
        most, unit = min(min(block.shape[:2]) for block in ranked), 1
    above = bisect.bisect_left(range(1, most), wanted, key=lambda n: trained(n * unit)) + 1
    near = (max(1, above - 1) * unit, above * unit)
    return table | {"rank": min(near, key=lambda rank: abs(trained(rank) - wanted))}


def _footprint(table: dict[str, Any], layout: Layout) -> Footprint:
    found: Footprint = tables.build("method", table).footprint(layout)
    return found


def _settings(name: str) -> set[str]:
    """The settings of a method."""
    return {one.name for one in dataclasses.fields(registry.choices("method")[name])}
