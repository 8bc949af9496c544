"""The Pareto front of several series: the evaluations that no other run beats for the same cost or less.

Every row counts as a place to stop, so the front says which method to take for so many bytes, whatever the length of
the runs. Between two rows a run is taken to go straight. A row counts only where all its seeds came through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedspan.study.curves import Axis, Curve, Floats, thinned
from fedspan.study.plan import Goal
from fedspan.study.series import Series

POINTS = 120  # of a curve, evenly on a plain axis and again on a logarithmic one


@dataclass(frozen=True)
class Stop:
    """A place to stop: row `cost` of series number `series`."""

    series: int
    cost: float
    value: float


def thin(curve: Curve) -> Curve:
    """The curve with as many rows as can be told apart on a screen."""
    rows = len(curve.rounds)
    return curve.at_rows(np.union1d(thinned(rows, False, POINTS), thinned(rows, True, POINTS)))


def front(series: Sequence[Series], metric: str, goal: Goal, axis: Axis) -> list[Stop]:
    """The front, from the cheapest stop to the dearest; what cost nothing is not on it."""
    sign = 1 if goal == "max" else -1
    lines = [_whole(thin(one.curve(metric)), axis, sign) for one in series]
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


def _whole(curve: Curve, axis: Axis, sign: int) -> tuple[Floats, Floats]:
    """Cost and worth, the more the better, of the rows that all seeds have."""
    worth = sign * curve.values.mean(0)
    there = np.isfinite(worth)
    return curve.spent(axis)[there], worth[there]


def _at(line: tuple[Floats, Floats], cost: float) -> float:
    """The worth at a cost, on the straight line between two rows; nothing before the first and beyond the last."""
    costs, worth = line
    inside = len(costs) and costs[0] <= cost <= costs[-1]
    return float(np.interp(cost, costs, worth)) if inside else -np.inf


def reach(series: Sequence[Series], metric: str, goal: Goal, axis: Axis) -> dict[int, tuple[float, float]]:
    """Series on the front → (cheapest, dearest) of its stops there."""
    out: dict[int, tuple[float, float]] = {}
    for stop in front(series, metric, goal, axis):
        low, _ = out.get(stop.series, (stop.cost, stop.cost))
        out[stop.series] = low, stop.cost
    return out
