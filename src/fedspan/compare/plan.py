"""What to compare: a base spec, variants of it with a grid each, and the runs that need to be made.

Runs are known by what decides their numbers, so two comparisons that need the same run share it, and a longer run goes
on from the shorter one that tuning has made.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedspan.compare.pool import Job
from fedspan.core.errors import SpecError, at_least, one_of
from fedspan.experiment import Spec, with_values

Point = dict[str, Any]  # dotted key of a spec → value


@dataclass(frozen=True)
class Variant:
    """One line of a comparison: a method with its settings, and the values to tune it over."""

    name: str
    label: str
    colour: str
    table: dict[str, Any]  # laid over the base spec
    grid: dict[str, list[Any]]

    def points(self) -> list[Point]:
        """Every combination of the grid."""
        return [dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]


@dataclass(frozen=True)
class Comparison:
    """Variants on one task under the same seeds."""

    name: str
    base: dict[str, Any]
    variants: list[Variant]
    seeds: int
    tune_seeds: int = 1
    tune_rounds: int | None = None  # None: as long as the runs themselves
    metric: str = "accuracy"
    goal: Literal["max", "min"] = "max"
    tail: int = 3  # evaluations at the end whose mean is the result

    def __post_init__(self) -> None:
        for name in ("seeds", "tune_seeds", "tail"):
            at_least(name, getattr(self, name), 1)
        one_of("goal", self.goal, ("max", "min"))
        if not self.variants:
            raise SpecError(f"comparison {self.name!r} has no variants")

    def spec(self, variant: Variant, point: Point, rounds: int | None = None) -> Spec:
        """The spec of one point of a variant's grid."""
        table = with_values(over(self.base, variant.table), point)
        return Spec.from_table(table | ({} if rounds is None else {"rounds": rounds}))

    def tuning(self, runs: Path) -> list[Job]:
        """The runs that decide each variant's point; none for a variant whose grid has one."""
        jobs = []
        for variant in self.variants:
            points = variant.points()
            for point in points if len(points) > 1 else ():
                jobs += jobs_of(self.spec(variant, point, self.horizon), runs, min(self.tune_seeds, self.seeds))
        return jobs

    def final(self, runs: Path, chosen: Mapping[str, Point]) -> list[Job]:
        """All seeds of each variant at its chosen point."""
        found = [jobs_of(self.spec(v, chosen[v.name]), runs, self.seeds) for v in self.variants]
        return [job for jobs in found for job in jobs]

    @property
    def horizon(self) -> int:
        """Rounds of a tuning run."""
        rounds = int(self.base["rounds"])
        return rounds if self.tune_rounds is None else min(self.tune_rounds, rounds)


def over(table: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The table with changes laid over it, tables inside tables as well; one that has a `name` stands for itself."""
    out = dict(table)
    for key, value in changes.items():
        old = out.get(key)
        merge = isinstance(old, dict) and isinstance(value, dict) and "name" not in value
        out[key] = over(old, value) if merge and isinstance(old, dict) else value
    return out


def folder_of(spec: Spec, runs: Path) -> Path:
    """Where the runs of a spec are, whatever their seed and length."""
    table = {k: v for k, v in spec.table().items() if k not in ("rounds", "seed")}
    digest = hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:10]
    return runs / f"{table['method']['name']}-{digest}"


def jobs_of(spec: Spec, runs: Path, seeds: int) -> list[Job]:
    """A spec under several seeds: one batched computation where the task can, else a job a seed."""
    folder = folder_of(spec, runs)
    if spec.task.several_seeds:
        return [Job(spec, folder / f"{seeds}-seeds", seeds)]
    every = range(spec.seed, spec.seed + seeds)
    return [Job(dataclasses.replace(spec, seed=seed), folder / f"seed-{seed}", 1) for seed in every]
