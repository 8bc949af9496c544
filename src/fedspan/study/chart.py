"""Charts as plain data, which web/chart.js draws: every metric against every cost, a group of lines per row of a part.

Client memory does not grow with the rounds, so against memory every series is one mark: its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedspan.core.method import DETAILS
from fedspan.engine.history import higher_is_better
from fedspan.study.curves import TITLES, Axis, Curve, over_seeds
from fedspan.study.model import Goal, Part
from fedspan.study.results import Entry
from fedspan.study.series import Series, rounded
from fedspan.study.tables import MEMORY, MEMORY_NOTE, scale_of, titled, unit_of

FEWER = 70  # rows on each axis of a line, where a part has several rows
BYTES: tuple[Axis, ...] = ("up", "total")
DIGITS: dict[Axis, int] = {"seconds": 4, "up": 5, "total": 5}
Scales = dict[Axis, float]


def chart(part: Part, entries: Sequence[Entry]) -> dict[str, Any]:
    """Everything that can be switched between. It starts with the part's metric against uplink or the budget's axis.

    A part with several rows shows its own metric only, and fewer points of each line, which keeps the page small. What
    a tested correction found is drawn below every metric.
    """
    known = list(
        dict.fromkeys([part.metric, *(name for one in entries for name in one.series.metrics)])
    )
    metrics = (
        [name for name in known if name in (part.metric, *DETAILS)] if len(part.rows) > 1 else known
    )
    higher = {name: higher_is_better(name, part.metrics) for name in metrics}
    goals = {name: "min" if known is False else "max" for name, known in higher.items()} | {
        part.metric: part.goal
    }
    unit, size = unit_of(part, entries)
    timed = any(np.isfinite(one.series.curve(part.metric).seconds).any() for one in entries)
    axes = [axis for axis in TITLES if axis != "seconds" or timed]
    scales: Scales = {axis: size if axis in BYTES else 1.0 for axis in axes}
    limits = (
        {}
        if part.budget is None
        else {axis: most / scales[axis] for axis, most in part.budget.limits.items()}
    )
    first = next((x for x in part.figure.get("x", []) if x in TITLES), next(iter(limits), "up"))
    return {
        "axes": {axis: {"label": TITLES[axis].format(unit), "log": axis in BYTES} for axis in axes},
        "metrics": {
            n: {"label": titled(n), "goal": goals[n], "log": goals[n] == "min"} for n in metrics
        },
        "start": {"x": first, "y": part.metric},
        "limits": limits,
        "rows": [row.label for row in part.rows] if len(part.rows) > 1 else [],
        "series": [
            line
            for row in range(len(part.rows))
            for line in _group(part, entries, row, metrics, scales)
        ],
    }


def _group(
    part: Part, entries: Sequence[Entry], row: int, metrics: list[str], scales: Scales
) -> list[dict[str, Any]]:
    """The lines of one row. Each has a marker of its own; a dash pattern also tells lines of one color apart."""
    series = [entry.series for entry in entries if entry.row == row]
    series = [one.thin(FEWER) for one in series] if len(part.rows) > 1 else series
    best = best_first(series, part.metric, part.goal)
    colors = [series[n].color for n in best]
    dashes = {n: colors[:place].count(colors[place]) for place, n in enumerate(best)}
    return [
        _line(one, metrics, scales) | {"row": row, "dash": dashes[n], "marker": n}
        for n, one in enumerate(series)
    ]


def by_memory(part: Part, entries: Sequence[Entry]) -> dict[str, Any] | None:
    """Every metric against client memory, one mark per series; None if no memory is known."""
    known = [entry for entry in entries if entry.client_memory is not None]
    if not known:
        return None
    drawn = chart(part, known)
    for line, entry in zip(drawn["series"], known, strict=True):
        line["x"] = {"memory": rounded(np.array([(entry.client_memory or 0) / 1e6]))}
        line["y"] = {name: _mark(part, entry.series.curve(name), name) for name in line["y"]}
    axes = {"memory": {"label": MEMORY, "log": False}}
    start = {"x": "memory", "y": part.metric}
    return drawn | {
        "axes": axes,
        "start": start,
        "limits": {},
        "about": MEMORY_NOTE.replace("`", ""),
    }


def _mark(part: Part, curve: Curve, metric: str) -> dict[str, Any]:
    """The result of the seeds that are alive, as a curve of one row."""
    curve = curve if part.budget is None else part.budget.within(curve)
    ends = curve.ends(part.last(len(curve.rounds)))
    lines = zip(("mean", "low", "high"), over_seeds(scale_of(metric) * ends[:, None]), strict=True)
    return {name: rounded(line) for name, line in lines} | {
        "whole": int(len(ends) == len(curve.values))
    }


def _line(one: Series, metrics: Sequence[str], scales: Scales) -> dict[str, Any]:
    known = {name: one.curve(name) for name in metrics if name in one.metrics}
    any_curve = next(iter(known.values()), one.curve(metrics[0]))
    return {
        "name": one.label,
        "color": one.color,
        "seeds": len(one.seeds),
        "gone": _gone(one, any_curve),
        "x": {axis: _costs(any_curve, axis, scale) for axis, scale in scales.items()},
        "y": {name: _values(curve, scale_of(name)) for name, curve in known.items()},
    }


def _costs(curve: Curve, axis: Axis, scale: float) -> list[float | int | None] | float:
    """What was spent up to each row; one number, the cost of a round, if every round costs the same."""
    costs, rounds = curve.spent(axis) / scale, curve.rounds
    each = float(f"{costs[-1] / rounds[-1]:.9g}") if rounds[-1] else 0.0
    even = axis in BYTES and np.allclose(each * rounds, costs, rtol=2e-7, atol=0)
    return each if even else rounded(costs, DIGITS.get(axis, 6))


def _values(curve: Curve, scale: float) -> dict[str, Any]:
    """Mean, lowest and highest of the seeds that have a row, and how many rows all of them have."""
    missing = np.flatnonzero(~np.isfinite(curve.values).all(0))
    mean, low, high = over_seeds(scale * curve.values)
    ends = (
        {"low": rounded(low, 4), "high": rounded(high, 4)} if len(curve.values) > 1 else {}
    )  # one seed: the mean
    return (
        {"mean": rounded(mean, 5)}
        | ends
        | {"whole": int(missing[0]) if len(missing) else len(curve.rounds)}
    )


def _gone(one: Series, curve: Curve) -> list[str]:
    """Seeds that diverged or failed, in words."""
    words = []
    for seed, t, failed in zip(one.seeds, curve.diverged, curve.failed, strict=True):
        words += (
            [f"seed {seed} failed"]
            if failed
            else []
            if t is None
            else [f"seed {seed} diverged at round {t}"]
        )
    return words


def best_first(series: Sequence[Series], metric: str, goal: Goal) -> list[int]:
    """Numbers of the series from the best last value to the worst; those of which a seed is gone come last."""
    sign = -1 if goal == "max" else 1
    ends = [one.curve(metric).tail(1) for one in series]
    return sorted(
        range(len(series)), key=lambda n: (not ends[n].whole, sign * np.nan_to_num(ends[n].mean))
    )
