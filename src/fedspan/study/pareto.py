"""The Pareto front of several series: the evaluations that no other run beats for the same cost or less.

Every row counts as a place to stop, so the front tells which method to take for a number of bytes, whatever the length
of the runs. Between two rows a run is interpolated linearly. A row counts only if all its seeds have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedspan.study.curves import Axis, Curve, Floats
from fedspan.study.model import Goal
from fedspan.study.series import Series


@dataclass(frozen=True)
class Stop:
    """A place to stop: a row of series number `series`."""

    series: int
    cost: float
    value: float


def pareto(series: Sequence[Series], metric: str, goal: Goal, axis: Axis) -> list[Stop]:
    """The Pareto-optimal rows, from the cheapest to the most expensive; rows that cost nothing are left out."""
    sign = 1 if goal == "max" else -1
    lines = [_worth(one.curve(metric), axis, sign) for one in series]
    costs = np.unique(np.concatenate([cost for cost, _ in lines]))
    best, out = -np.inf, []
    for cost in costs[costs > 0].tolist():
        values = [_at(line, cost) for line in lines]
        place = int(np.argmax(values))
        if values[place] > best:
            best = values[place]
            if cost in lines[place][0]:
                out.append(Stop(place, cost, sign * best))
    return out


def _worth(curve: Curve, axis: Axis, sign: int) -> tuple[Floats, Floats]:
    """Cost and worth, the more the better, of the rows that all seeds have."""
    worth = sign * curve.values.mean(0)
    there = np.isfinite(worth)
    return curve.spent(axis)[there], worth[there]


def _at(line: tuple[Floats, Floats], cost: float) -> float:
    """The worth at a cost; nothing before the first row and beyond the last."""
    costs, worth = line
    inside = len(costs) and costs[0] <= cost <= costs[-1]
    return float(np.interp(cost, costs, worth)) if inside else -np.inf


def reach(
    series: Sequence[Series], metric: str, goal: Goal, axis: Axis
) -> dict[int, tuple[float, float]]:
    """Number of a series → (cheapest, most expensive) of its Pareto-optimal rows."""
    out: dict[int, tuple[float, float]] = {}
    for stop in pareto(series, metric, goal, axis):
        low, _ = out.get(stop.series, (stop.cost, stop.cost))
        out[stop.series] = low, stop.cost
    return out
