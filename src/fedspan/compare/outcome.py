"""What a comparison came to: each variant's best point, its curve over all seeds, and its standing at equal bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from fedspan.compare.curves import Curve, Floats, Tail
from fedspan.compare.plan import Comparison, Point, Variant, jobs_of
from fedspan.core.errors import CheckpointError

Axis = Literal["round", "up", "bytes"]


@dataclass(frozen=True)
class Trial:
    """One point of a variant's grid and how it did in tuning."""

    point: Point
    end: Tail


class Outcome:
    """Everything the tables and figures of a comparison show, read from its runs."""

    def __init__(self, comparison: Comparison, runs: Path) -> None:
        self.comparison, self.runs = comparison, runs
        self._trials: dict[str, list[Trial]] = {}
        self._curves: dict[str, Curve] = {}

    def trials(self, variant: Variant) -> list[Trial]:
        """All points of a variant's grid; none where there was nothing to choose."""
        plan = self.comparison
        if variant.name not in self._trials:
            points = variant.points()
            seeds = min(plan.tune_seeds, plan.seeds)
            self._trials[variant.name] = [
                Trial(point, self._read(variant, point, plan.horizon, seeds).tail(plan.tail))
                for point in (points if len(points) > 1 else ())
            ]
        return self._trials[variant.name]

    def chosen(self) -> dict[str, Point]:
        """Each variant's best point; one at which any seed diverged is the last to be taken."""
        sign = 1 if self.comparison.goal == "max" else -1

        def rank(trial: Trial) -> float:
            return -math.inf if trial.end.diverged or math.isnan(trial.end.mean) else sign * trial.end.mean

        out = {}
        for variant in self.comparison.variants:
            trials = self.trials(variant)
            out[variant.name] = max(trials, key=rank).point if trials else variant.points()[0]
        return out

    def at_edge(self, variant: Variant) -> bool:
        """Whether the best point lies at an end of the grid, so that a better one may lie beyond."""
        point = self.chosen()[variant.name]
        return any(len(values) > 1 and point[key] in (values[0], values[-1]) for key, values in variant.grid.items())

    def curve(self, variant: Variant) -> Curve:
        """All seeds of a variant at its best point."""
        if variant.name not in self._curves:
            plan = self.comparison
            self._curves[variant.name] = self._read(
                variant, self.chosen()[variant.name], int(plan.base["rounds"]), plan.seeds
            )
        return self._curves[variant.name]

    def final(self, variant: Variant) -> Tail:
        """The mean of the last evaluations."""
        return self.curve(variant).tail(self.comparison.tail)

    def best(self, variant: Variant) -> Tail:
        """The best evaluation of each seed."""
        curve = self.curve(variant)
        pick = np.nanmax if self.comparison.goal == "max" else np.nanmin
        tops = np.array([pick(row) for row in curve.values])
        spread = float(tops.std(ddof=1)) if len(tops) > 1 else math.nan
        return Tail(float(tops.mean()), spread, 0, len(tops))

    def budget(self, axis: Axis) -> float:
        """The most that every variant has spent that did not diverge: rounds or bytes at which all can be compared."""
        whole = [v for v in self.comparison.variants if not all(self.curve(v).diverged)]
        return min(float(self.spent(v, axis)[-1]) for v in whole or self.comparison.variants)

    def spent(self, variant: Variant, axis: Axis) -> Floats:
        """What each row of a variant's curve has cost."""
        curve = self.curve(variant)
        return {"round": curve.rounds, "up": curve.up, "bytes": curve.up + curve.down}[axis]

    def at(self, variant: Variant, axis: Axis, budget: float) -> Tail:
        """The mean of the last evaluations within a budget."""
        curve = self.curve(variant)
        rows = int(np.searchsorted(self.spent(variant, axis), budget, side="right"))
        return curve.until(int(curve.rounds[max(rows, 1) - 1])).tail(min(self.comparison.tail, max(rows, 1)))

    def _read(self, variant: Variant, point: Point, rounds: int, seeds: int) -> Curve:
        spec = self.comparison.spec(variant, point, rounds)
        jobs = jobs_of(spec, self.runs, seeds)
        files = [file for job in jobs for file in job.histories()]
        missing = next((file for file in files if not file.exists()), None)
        if missing is not None:
            raise CheckpointError(f"{str(missing)!r} is missing; run the comparison again")
        return Curve.read(files, self.comparison.metric, spec.task.several_seeds).until(rounds)
