"""A chart of several series as plain data, which page.js draws: every metric against every cost, thinned, rounded.

What a client's memory holds does not grow with the rounds: against that every series is one mark, its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedspan.study.budget import UNITS, Budget
from fedspan.study.curves import TITLES, Axis, Curve, Floats, over_seeds
from fedspan.study.memory import WORDS
from fedspan.study.pareto import thin
from fedspan.study.plan import Goal, goal_of
from fedspan.study.series import Series
from fedspan.study.tables import MEMORY, scale_of, titled

SHOWN = 8  # lines that are drawn at first; the others wait in the legend
BYTES: tuple[Axis, ...] = ("up", "total")


def chart(series: Sequence[Series], metric: str, goal: Goal, budget: Budget | None = None) -> dict[str, Any]:
    """Everything that can be switched between; `metric` and uplink bytes, or the budget's axis, come first."""
    metrics = list(dict.fromkeys([metric, *(name for one in series for name in one.metrics)]))
    goals = {name: goal_of(name) for name in metrics} | {metric: goal}
    most = max((float(one.curve(metric).spent("total")[-1]) for one in series), default=0.0)
    unit, size = next((u for u in reversed(UNITS.items()) if most >= u[1]), ("B", 1.0))
    scales: dict[Axis, float] = {axis: size if axis in BYTES else 1.0 for axis in TITLES}
    best = best_first(series, metric, goal)
    dashes = _dashes([series[n].color for n in best])
    limits = {} if budget is None else {axis: most / scales[axis] for axis, most in budget.limits.items()}
    return {
        "axes": {axis: {"label": title.format(unit), "log": axis in BYTES} for axis, title in TITLES.items()},
        "metrics": {n: {"label": titled(n), "goal": goals[n], "log": goals[n] == "min"} for n in metrics},
        "start": {"x": next(iter(limits), "up"), "y": metric},
        "limits": limits,
        "series": [
            _line(one, metrics, scales) | {"dash": dashes[best.index(n)], "on": n in best[:SHOWN]}
            for n, one in enumerate(series)
        ],
    }


def by_memory(
    series: Sequence[Series],
    memories: Sequence[int | None],
    metric: str,
    goal: Goal,
    budget: Budget | None = None,
    tail: int = 1,
) -> dict[str, Any] | None:
    """Every metric against client memory, one mark a series; None where no memory is known."""
    known = {number: size for number, size in enumerate(memories) if size is not None}
    if not known:
        return None
    shown = [series[number] for number in known]
    drawn = chart(shown, metric, goal)
    for line, one, size in zip(drawn["series"], shown, known.values(), strict=True):
        line["x"] = {"memory": _rounded(np.array([size / 1e6]))}
        line["y"] = {name: _mark(one.curve(name), name, budget, tail) for name in line["y"]}
    axes = {"memory": {"label": MEMORY, "log": False}}
    return drawn | {"axes": axes, "start": {"x": "memory", "y": metric}, "limits": {}, "about": WORDS.replace("`", "")}


def _mark(curve: Curve, metric: str, budget: Budget | None, tail: int) -> dict[str, Any]:
    """The result of the seeds that came through, as a curve of one row."""
    ends = (curve if budget is None else budget.within(curve)).ends(tail)
    lines = zip(("mean", "low", "high"), over_seeds(scale_of(metric) * ends[:, None]), strict=True)
    return {name: _rounded(line) for name, line in lines} | {"whole": int(len(ends) == len(curve.values))}


def _line(one: Series, metrics: Sequence[str], scales: dict[Axis, float]) -> dict[str, Any]:
    known = {name: thin(one.curve(name)) for name in metrics if name in one.metrics}
    any_curve = next(iter(known.values()), one.curve(metrics[0]))
    return {
        "name": one.label,
        "color": one.color,
        "seeds": len(one.seeds),
        "gone": _gone(one, any_curve),
        "x": {axis: _rounded(any_curve.spent(axis) / scale) for axis, scale in scales.items()},
        "y": {name: _values(curve, scale_of(name)) for name, curve in known.items()},
    }


def _values(curve: Curve, scale: float) -> dict[str, Any]:
    """Mean, lowest and highest of the seeds that have a row, and how many rows all of them have."""
    missing = np.flatnonzero(~np.isfinite(curve.values).all(0))
    lines = zip(("mean", "low", "high"), over_seeds(scale * curve.values), strict=True)
    whole = int(missing[0]) if len(missing) else len(curve.rounds)
    return {name: _rounded(line) for name, line in lines} | {"whole": whole}


def _gone(one: Series, curve: Curve) -> list[str]:
    """Seeds that did not come through, in words."""
    words = []
    for seed, t, failed in zip(one.seeds, curve.diverged, curve.failed, strict=True):
        words += [f"seed {seed} failed"] if failed else [] if t is None else [f"seed {seed} diverged at round {t}"]
    return words


def best_first(series: Sequence[Series], metric: str, goal: Goal) -> list[int]:
    """Numbers of the series from the best end to the worst; those that did not come through stand last."""
    sign = -1 if goal == "max" else 1
    ends = [one.curve(metric).tail(1) for one in series]
    return sorted(range(len(series)), key=lambda n: (not ends[n].whole, sign * np.nan_to_num(ends[n].mean)))


def _dashes(colors: Sequence[str]) -> list[int]:
    """Which pattern tells a line from those before it that have its color."""
    return [list(colors[:n]).count(color) for n, color in enumerate(colors)]


def _rounded(values: Floats) -> list[float | None]:
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values]
