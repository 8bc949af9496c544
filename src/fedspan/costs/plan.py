"""`plan`: what each method will cost on a spec's task, or on a Hugging Face model that is not even downloaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedspan.core import building, registry
from fedspan.core.errors import SpecError, items, one_of, shown
from fedspan.core.layout import Layout
from fedspan.core.spec import Spec
from fedspan.costs.memory import Memory
from fedspan.costs.model import ModelRequest, comparable
from fedspan.costs.outline import Outline, client_process, outline, rehearsed, sibling
from fedspan.costs.traffic import AnyMethod, Cost, cost

RANK = 0.1  # of a subspace where a spec has none


@dataclass(frozen=True)
class Row:
    """What one method costs."""

    method: str
    rank: Any  # of its subspace or adapters; None: it has neither
    trained: int  # numbers that a local step trains
    cost: Cost
    memory: Memory | None  # of one client; None: not a network, or it does not run without numbers
    client_peak: (
        int | None
    )  # bytes of a client's process across machines, besides Python, torch and Flower


@dataclass(frozen=True)
class Plan:
    """What each method costs on one model."""

    parameters: int  # numbers of the model, trained or not
    layout: Layout  # of what is trained
    clients: int
    clients_per_round: int
    rounds: int
    rows: tuple[Row, ...]

    def __getitem__(self, method: str) -> Row:
        one_of("method", method, [row.method for row in self.rows])
        return next(row for row in self.rows if row.method == method)


def plan(
    source: Spec | Path | str | Mapping[str, Any] | ModelRequest,
    methods: Sequence[str] | None = None,
) -> Plan:
    """Plans bytes, memory and disk of a run, without running it.

    Args:
        source: A `Spec`, the path of a TOML file or a table of plain values; or a `ModelRequest`.
        methods: Names of the methods to plan. By default all that are registered for a spec, and for a model those
            that are compared most: SSF, LoRA (`fedit`), FFA-LoRA, FedAvg and SCAFFOLD.

    Returns:
        A row per method. All take the spec's steps, subspace and compressor as far as they can; on a model all that
        have a rank train about the same amount of numbers.
    """
    if methods is not None:
        names = items("methods", methods)
        if not names:
            raise SpecError("`methods` is empty; name at least one method, or leave it out for all")
        methods = [registry.registered_name("method", name, "methods") for name in names]
    if isinstance(source, ModelRequest):
        found = Outline(*source.outline())
        made = comparable(source, found.problem.layout, methods)
        return _planned(made, found, source.clients_per_round, source.rounds, 0)
    if not isinstance(source, Spec | str | Path | Mapping):
        raise SpecError(
            f"`source` must be a Spec, the path of a TOML file, a table or a ModelRequest, got {shown(source)}"
        )
    if isinstance(source, str | Path):
        source = Spec.load(source)
    spec = source if isinstance(source, Spec) else Spec.from_table(source)
    chosen = list(registry.choices("method")) if methods is None else methods
    built = ((name, building.build("method", sibling(spec, name, RANK))) for name in chosen)
    known_start = spec.participation.known_start
    return _planned(
        built,
        outline(spec),
        spec.clients_per_round,
        spec.rounds,
        spec.seed,
        known_start=known_start,
    )


def _planned(
    methods: Iterable[tuple[str, AnyMethod]], found: Outline, clients_per_round: int | None, rounds: int, seed: int,
    *, known_start: bool = False,
) -> Plan:  # fmt: skip
    problem = found.problem
    cohort = clients_per_round or problem.clients
    rows = []
    for name, method in methods:
        spent = cost(method, problem, cohort, rounds, seed, known_start=known_start)
        trained = method.footprint(problem.layout).trained
        peak = client_process(method, found.sketch, max(1, problem.clients // cohort))
        if peak is not None and known_start:  # the initial weights stay
            peak += problem.layout.size * problem.layout.dtype.itemsize
        rows.append(Row(name, _rank(method), trained, spent, rehearsed(method, found.sketch), peak))
    return Plan(found.parameters, problem.layout, problem.clients, cohort, rounds, tuple(rows))


def _rank(method: AnyMethod) -> Any:
    return getattr(getattr(method, "projector", method), "rank", None)
