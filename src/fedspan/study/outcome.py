"""What a comparison came to: each variant's best point, its curve over all seeds, and its standing at equal bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedspan.core.errors import CheckpointError
from fedspan.engine import history
from fedspan.study.curves import Axis, Curve, Tail
from fedspan.study.plan import Comparison, Point, Variant, jobs_of
from fedspan.study.pool import Job
from fedspan.study.series import Series, setting


@dataclass(frozen=True)
class Trial:
    """One point of a variant's grid and how it did in tuning."""

    point: Point
    rounds: int
    end: Tail
    curve: Curve


class Outcome:
    """Everything the tables and figures of a comparison show, read from its runs."""

    def __init__(self, comparison: Comparison, runs: Path) -> None:
        self.comparison, self.runs = comparison, runs
        self._trials: dict[str, list[Trial]] = {}
        self._series: dict[str, Series] = {}

    def trials(self, variant: Variant) -> list[Trial]:
        """All points of a variant's grid; none where there was nothing to choose."""
        if variant.name not in self._trials:
            points = variant.points()
            self._trials[variant.name] = [self._try(variant, point) for point in (points if len(points) > 1 else ())]
        return self._trials[variant.name]

    def chosen(self) -> dict[str, Point]:
        """Each variant's best point; one at which any seed diverged or failed is the last to be taken."""
        out = {}
        for variant in self.comparison.variants:
            trials = self.trials(variant)
            best = max(trials, key=lambda trial: self._rank(trial.end), default=None)
            out[variant.name] = best.point if best is not None else variant.points()[0]
        return out

    def at_edge(self, variant: Variant) -> bool:
        """Whether the best point lies at an end of the grid, so that a better one may lie beyond."""
        point = self.chosen()[variant.name]
        numbers = {k: v for k, v in variant.grid.items() if len(v) > 1 and all(isinstance(x, int | float) for x in v)}
        return any(point[key] in (min(values), max(values)) for key, values in numbers.items())

    def series(self, variant: Variant) -> Series:
        """All seeds of a variant at its best point."""
        if variant.name not in self._series:
            plan = self.comparison
            spec = plan.spec(variant, self.chosen()[variant.name])
            self._series[variant.name] = _read(variant, jobs_of(spec, self.runs, plan.seeds))
        return self._series[variant.name]

    def curve(self, variant: Variant) -> Curve:
        """The same in the metric that is compared."""
        return self.series(variant).curve(self.comparison.metric)

    def final(self, variant: Variant) -> Tail:
        """The mean of the last evaluations, within the budget where there is one."""
        return self._end(self.curve(variant))

    def best(self, variant: Variant) -> Tail:
        """The best evaluation of each seed, within the budget where there is one."""
        return self.within(variant).best(self.comparison.goal)

    def within(self, variant: Variant) -> Curve:
        """The part of a curve that counts."""
        budget = self.comparison.budget
        return self.curve(variant) if budget is None else budget.within(self.curve(variant))

    def budget(self, axis: Axis) -> float:
        """The most that every variant has spent that came through: rounds or bytes at which all can be compared."""
        whole = [v for v in self.comparison.variants if self.curve(v).alive()]
        return min(float(self.curve(v).spent(axis)[-1]) for v in whole or self.comparison.variants)

    def at(self, variant: Variant, axis: Axis, budget: float) -> Tail:
        """The mean of the last evaluations within a budget."""
        return self._at(self.curve(variant), axis, budget)

    def tuned_at(self, variant: Variant, axis: Axis, budget: float) -> Tail:
        """The same at the point of the grid that did best there in tuning; all seeds where that is the chosen one."""
        ends = [(trial.point, self._at(trial.curve, axis, budget)) for trial in self.trials(variant)]
        point, end = max(ends, key=lambda pair: self._rank(pair[1]), default=(None, None))
        return self.at(variant, axis, budget) if end is None or point == self.chosen()[variant.name] else end

    def _at(self, curve: Curve, axis: Axis, budget: float) -> Tail:
        rows = max(1, int(np.searchsorted(curve.spent(axis), budget, side="right")))
        return curve.until(int(curve.rounds[rows - 1])).tail(min(self.comparison.tail, rows))

    def _rank(self, end: Tail) -> float:
        """The higher the better; an end that not every seed reached is the last to be taken."""
        sign = 1 if self.comparison.goal == "max" else -1
        return sign * end.mean if end.whole else -math.inf

    def jobs(self) -> list[Job]:
        """All runs that this outcome rests on."""
        return self.comparison.tuning(self.runs) + self.comparison.final(self.runs, self.chosen())

    def failures(self) -> list[str]:
        """Runs that failed, and why."""
        plan, found = self.comparison, []
        for variant in plan.variants:
            chosen, points = self.chosen()[variant.name], variant.points()
            for point in points:
                jobs = plan.trial(variant, point, self.runs) if len(points) > 1 else []
                jobs += jobs_of(plan.spec(variant, point), self.runs, plan.seeds) if point == chosen else []
                name = ", ".join([variant.label, *(setting(key, value) for key, value in point.items())])
                found += [f"{name}: {why}" for job in jobs if (why := job.failure())]
        return list(dict.fromkeys(found))

    def _try(self, variant: Variant, point: Point) -> Trial:
        jobs = self.comparison.trial(variant, point, self.runs)
        curve = _read(variant, jobs).curve(self.comparison.metric)
        return Trial(point, jobs[0].spec.rounds, self._end(curve), curve)

    def _end(self, curve: Curve) -> Tail:
        plan = self.comparison
        curve = curve if plan.budget is None else plan.budget.within(curve)
        return curve.tail(min(plan.tail, len(curve.rounds)))


def _read(variant: Variant, jobs: list[Job]) -> Series:
    """The runs of one point as a series, no longer than they were asked to be."""
    runs = []
    for job in jobs:
        for file in job.histories():
            if not file.exists() and job.failure() is None:
                raise CheckpointError(f"{str(file)!r} is missing; run the comparison again")
            rows = [] if job.failure() is not None else history.read(file)[1]
            runs.append(tuple(row for row in rows if row["round"] <= job.spec.rounds))
    seeds = tuple(seed for job in jobs for seed in range(job.spec.seed, job.spec.seed + job.seeds))
    return Series(variant.label, variant.color, jobs[0].spec.table(), seeds, tuple(runs))
