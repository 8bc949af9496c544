"""What to compare: a base spec, variants of it with a grid each, and the runs that need to be made.

Runs are known by what decides their numbers, so two comparisons that need the same run share it, and a longer run goes
on from the shorter one that tuning has made. As a TOML file, which `fedspan compare` reads and writes:

    seeds = 3
    metric = "accuracy"
    budget = ["up=10MB"]                      # or none: all run for base.rounds
    [base]                                    # a spec
    [variants.ssf]                            # tables laid over the base
    label = "SSF"
    method = { rank = 0.1 }
    grid = { "method.lr" = [0.1, 0.3, 1.0] }
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

from fedspan.api.spec import Spec, with_values
from fedspan.core.errors import SpecError, at_least, one_of
from fedspan.study.budget import Budget
from fedspan.study.pool import Job

Point = dict[str, Any]  # dotted key of a spec → value
Goal = Literal["max", "min"]
# Okabe and Ito's colors, told apart by color-blind readers too; without yellow, which is too faint for a line.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#000000", "#D55E00", "#56B4E9")
LAID_OVER = ("method", "task", "participation", "epochs")  # what a variant may have of its own


def goal_of(metric: str) -> Goal:
    """Whether more or less of a metric is better, by its name."""
    return "max" if metric in ("accuracy", "token_accuracy", "f1", "auc") else "min"


def main_metric(known: list[str]) -> str:
    """Of the metrics that a task reports, the one to compare by."""
    if not known:
        raise SpecError("the task reports no metric to compare by; give it a test set")
    return next((name for name in ("accuracy", "rel_err", "loss") if name in known), known[0])


@dataclass(frozen=True)
class Variant:
    """One line of a comparison: a method with its settings, and the values to tune it over."""

    name: str
    label: str
    color: str
    table: dict[str, Any]  # laid over the base spec
    grid: dict[str, list[Any]]

    @staticmethod
    def from_table(name: str, table: Mapping[str, Any], number: int = 0) -> Variant:
        """As a file has it; label and color may be left out."""
        for key in table:
            one_of(f"key of [variants.{name}]", key, (*LAID_OVER, "label", "color", "grid"))
        changes = {key: table[key] for key in LAID_OVER if key in table}
        color = table.get("color", COLORS[number % len(COLORS)])
        return Variant(name, table.get("label", name), color, changes, dict(table.get("grid", {})))

    def to_table(self) -> dict[str, Any]:
        """What `from_table` would read this variant from."""
        return {"label": self.label, "color": self.color, "grid": self.grid} | self.table

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
    goal: Goal = "max"
    tail: int = 3  # evaluations at the end whose mean is the result
    budget: Budget | None = None  # None: all run for the base's rounds

    def __post_init__(self) -> None:
        for name in ("seeds", "tune_seeds", "tail"):
            at_least(name, getattr(self, name), 1)
        if self.tune_rounds is not None:
            at_least("tune_rounds", self.tune_rounds, 1)
        one_of("goal", self.goal, ("max", "min"))
        if not self.variants:
            raise SpecError(f"comparison {self.name!r} has no variants")

    @staticmethod
    def from_table(table: Mapping[str, Any]) -> Comparison:
        """As a file has it."""
        fields = {field.name for field in dataclasses.fields(Comparison)}
        for key in table:
            one_of("key of a comparison", key, fields)
        for key in ("base", "variants"):
            if not isinstance(table.get(key), dict):
                raise SpecError(f"a comparison needs [{key}]")
        variants = [Variant.from_table(name, one, n) for n, (name, one) in enumerate(table["variants"].items())]
        plain: dict[str, Any] = {
            "name": "comparison",
            "seeds": 3,
            "tail": 1,
            "goal": goal_of(table.get("metric", "")),
        } | dict(table)
        return Comparison(**plain | {"variants": variants, "budget": Budget.parse(table.get("budget", ()))})

    def to_table(self) -> dict[str, Any]:
        """What `from_table` would read this comparison from."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) is not None}
        plain |= {} if self.budget is None else {"budget": self.budget.texts()}
        return plain | {"variants": {variant.name: variant.to_table() for variant in self.variants}}

    def spec(self, variant: Variant, point: Point, rounds: int | None = None) -> Spec:
        """The spec of one point of a variant's grid, as long as the budget allows unless it is said."""
        spec = Spec.from_table(with_values(over(self.base, variant.table), point))
        if rounds is None and self.budget is not None:
            rounds = self.budget.rounds(spec)
        return spec if rounds is None else dataclasses.replace(spec, rounds=rounds)

    def horizon(self, spec: Spec) -> int:
        """Rounds of a spec's run in tuning."""
        return spec.rounds if self.tune_rounds is None else min(self.tune_rounds, spec.rounds)

    def trial(self, variant: Variant, point: Point, runs: Path) -> list[Job]:
        """The runs that try one point of a grid."""
        spec = self.spec(variant, point)
        short = dataclasses.replace(spec, rounds=self.horizon(spec))
        return jobs_of(short, runs, min(self.tune_seeds, self.seeds))

    def tuning(self, runs: Path) -> list[Job]:
        """The runs that decide each variant's point; none for a variant whose grid has one."""
        jobs = []
        for variant in self.variants:
            points = variant.points()
            for point in points if len(points) > 1 else ():
                jobs += self.trial(variant, point, runs)
        return jobs

    def final(self, runs: Path, chosen: Mapping[str, Point]) -> list[Job]:
        """All seeds of each variant at its chosen point."""
        found = [jobs_of(self.spec(v, chosen[v.name]), runs, self.seeds) for v in self.variants]
        return [job for jobs in found for job in jobs]


def over(table: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The table with changes laid over it, tables inside tables as well; one that has a `name` stands for itself."""
    out = dict(table)
    for key, value in changes.items():
        old = out.get(key)
        merge = isinstance(old, dict) and isinstance(value, dict) and "name" not in value
        out[key] = over(old, value) if merge and isinstance(old, dict) else value
    return out


def apart(table: Mapping[str, Any]) -> str:
    """What sets a run apart, whatever its seed and length."""
    return json.dumps({k: v for k, v in table.items() if k not in ("rounds", "seed")}, sort_keys=True)


def folder_of(spec: Spec, runs: Path) -> Path:
    """Where the runs of a spec are, whatever their seed and length."""
    table = spec.table()
    digest = hashlib.sha256(apart(table).encode()).hexdigest()[:10]
    return runs / f"{table['method']['name']}-{digest}"


def jobs_of(spec: Spec, runs: Path, seeds: int) -> list[Job]:
    """A spec under several seeds: one batched computation where the task can, else a job a seed."""
    folder = folder_of(spec, runs)
    if spec.task.several_seeds:
        return [Job(spec, folder / f"{seeds}-seeds", seeds)]
    every = range(spec.seed, spec.seed + seeds)
    return [Job(dataclasses.replace(spec, seed=seed), folder / f"seed-{seed}", 1) for seed in every]
