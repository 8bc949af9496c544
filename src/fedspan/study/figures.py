"""Figures: the metric of a part against rounds and bytes, or or against a tuned setting."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from fedspan.study.curves import AXES, BYTES, Axis, over_seeds
from fedspan.study.model import Part
from fedspan.study.results import Entries, Entry
from fedspan.study.tables import scale_of, titled, unit_of

STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "svg.hashsalt": "fedspan",
}
MARKERS = "os^DvPp"  # lines are told by color and marker, as on the page
ACROSS = 3  # panels side by side


def panels(down: int, across: int, share: bool = False) -> tuple[Any, Any]:
    """Return a figure of panels of equal size; with `share` those side by side have one y axis."""
    size = (1.2 + 3.5 * across, 0.3 + 2.9 * down)
    figure = Figure(size, layout="constrained")  # not of pyplot: no window, and nothing to close
    return figure, figure.subplots(down, across, squeeze=False, sharey="row" if share else False)


def save(figure: Any, path: Path) -> Path:
    """Write PNG and SVG with one legend for all panels; return the path of the SVG."""
    lines: dict[str, Any] = {}
    for axis in figure.axes:
        handles, labels = axis.get_legend_handles_labels()
        lines |= zip(labels, handles, strict=True)
    if lines:
        columns = max(1, int(figure.get_figwidth() / 2.1))
        figure.legend(lines.values(), lines, fontsize=8, loc="outside lower center", ncols=columns)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path.with_suffix(".svg"), bbox_inches="tight", metadata={"Date": None})
    figure.savefig(path.with_suffix(".png"), bbox_inches="tight", dpi=150)
    return path.with_suffix(".svg")


def band(axis: Any, x: Any, values: Any, color: str, label: str, **look: Any) -> Any:
    """Draw the mean line of several seeds and a band from the lowest to the highest; return the mean."""
    middle, low, high = over_seeds(values)
    if not np.isfinite(middle).any():  # every run failed or diverged at once
        look.pop("markevery", None)
    axis.plot(x, middle, color=color, lw=1.4, label=label, **look)
    axis.fill_between(x, low, high, color=color, alpha=0.15, lw=0)
    return middle


def draw(part: Part, entries: Entries, path: Path) -> Path:
    """Draw one panel per axis and row: a part with one row has its axes side by side, another one its rows."""
    kinds = part.figure.get("x", ["round", *BYTES] if len(part.rows) == 1 else ["round"])
    rows = part.figure.get("rows", list(range(len(part.rows))))
    cells = list(itertools.product(kinds, rows))
    across = min(ACROSS, len(rows) if len(rows) > 1 else len(cells))
    with plt.rc_context(STYLE):
        figure, axes = panels(-(-len(cells) // across), across, share=len(rows) > 1)
        for n, axis in enumerate(axes.flat):
            if n >= len(cells):
                axis.set_visible(False)
                continue
            kind, row = cells[n]
            here = [entry for entry in entries if entry.row == row]
            axis.set_title(part.rows[row].label)
            axis.set_xscale("linear" if kind == "round" else "log")
            axis.set_yscale("linear" if part.goal == "max" else "log")
            if kind in AXES:
                _curves(axis, part, here, kind, part.metric)
            else:
                _grid(axis, part, here, kind)
        for line in axes:
            line[0].set_ylabel(titled(part.metric))
        return save(figure, path)


def compare(part: Part, entries: Entries, kind: Axis, metric: str, axis: Any = None) -> Any:
    """Draw a metric of every variant against a cost on one axis."""
    axis = axis or plt.subplots(layout="constrained")[1]
    _curves(axis, part, entries, kind, metric)
    axis.set_ylabel(titled(metric))
    axis.legend(frameon=False)
    return axis


def _look(part: Part, entry: Entry) -> dict[str, Any]:
    """Return color, label and marker of an entry. Markers are staggered, so that lines on top of each other show."""
    number = [variant.name for variant in part.variants].index(entry.variant)
    return {
        "color": entry.series.color,
        "label": entry.label,
        "marker": MARKERS[number % len(MARKERS)],
        "ms": 6,
        "mec": "white",
        "mew": 0.6,
        "ls": ("-", "--", ":", "-.")[number // len(MARKERS) % 4],
        "markevery": (0.03 + 0.22 * number / len(part.variants), 0.22),
    }


def _curves(axis: Any, part: Part, entries: Entries, kind: Axis, metric: str) -> None:
    """Draw a metric of every variant against a cost, and the budget as a dotted line.

    A cross marks where a seed diverged, which is not followed.
    """
    unit, size = unit_of(entries)
    size = size if kind in BYTES else 1.0
    curves = [entry.series.curve(metric) for entry in entries]
    starts = [scale_of(metric) * curve.values[:, :1] for curve in curves]
    most = np.inf if part.goal == "max" else 3 * np.nanmax(np.concatenate(starts), initial=0)
    for entry, curve in zip(entries, curves, strict=True):
        x = curve.spent[kind] / size
        there = (x > 0) | (axis.get_xscale() == "linear")
        x, values = x[there], scale_of(metric) * curve.values[:, there]
        middle = band(axis, x, np.where(values > most, np.nan, values), **_look(part, entry))
        known = np.flatnonzero(np.isfinite(middle))
        if len(known) and any(t is not None for t in curve.diverged):
            end, color = known[-1], entry.series.color
            axis.plot(x[end], middle[end], "x", color=color, clip_on=False, ms=7, mew=2)
    if part.budget is not None and kind in part.budget.limits:
        axis.axvline(part.budget.limits[kind] / size, color="0.5", ls=":", lw=1)
    axis.set_xlabel(AXES[kind].format(unit))


def _grid(axis: Any, part: Part, entries: Entries, key: str) -> None:
    """Draw the result of every point of a grid against one of its settings."""
    for entry in entries:
        points = [(one.point[key], one.end) for one in entry.tried if key in one.point]
        ends = [scale_of(part.tune_metric) * end.mean if end.whole else np.nan for _, end in points]
        look = _look(part, entry) | {"markevery": None}
        axis.plot([x for x, _ in points], ends, lw=1.4, **look)
    axis.set_xlabel(f"{key.rpartition('.')[2]} (no point: diverged)")
