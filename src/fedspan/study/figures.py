"""Figures: the metric of a part against rounds and bytes, or against a tuned setting; and who holds what."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from fedspan.core.task import Holdings
from fedspan.study.curves import AXES, BYTES, Axis, over_seeds
from fedspan.study.model import Part
from fedspan.study.results import Entry
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
MARKERS = "os^DvP*"  # as on the page: lines are told by color and marker
ACROSS = 3  # panels side by side
NAMED = 40  # rows or columns of a heat map that have room for names


def panels(down: int, across: int, share: bool = False) -> tuple[Any, Any]:
    """Return a figure of panels of equal size; with `share` those side by side have one y axis."""
    size = (1.2 + 3.5 * across, 0.3 + 2.9 * down)
    figure = Figure(size, layout="constrained")  # not of pyplot: no window, and nothing to close
    return figure, figure.subplots(down, across, squeeze=False, sharey="row" if share else False)


def save(figure: Any, path: Path, legend: dict[str, Any]) -> Path:
    """Write PNG and SVG with a legend of label → handle; return the path of the SVG."""
    if legend:
        columns = max(1, int(figure.get_figwidth() / 2.1))
        figure.legend(
            legend.values(), legend.keys(), fontsize=8, loc="outside lower center", ncols=columns
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path.with_suffix(".svg"), bbox_inches="tight", metadata={"Date": None})
    figure.savefig(path.with_suffix(".png"), bbox_inches="tight", dpi=150)
    return path.with_suffix(".svg")


def handles(axes: Any) -> dict[str, Any]:
    """Return label → handle over several panels."""
    found: dict[str, Any] = {}
    for axis in np.ravel(axes):
        lines, labels = axis.get_legend_handles_labels()
        found |= zip(labels, lines, strict=True)
    return found


def band(axis: Any, x: Any, values: Any, color: str, label: str, **look: Any) -> Any:
    """Draw the mean line of several seeds and a band from the lowest to the highest; return the mean."""
    middle, low, high = over_seeds(values)
    if not np.isfinite(middle).any():  # every run failed or diverged at once
        look.pop("markevery", None)
    axis.plot(x, middle, color=color, lw=1.4, label=label, **look)
    axis.fill_between(x, low, high, color=color, alpha=0.15, lw=0)
    return middle


def draw(part: Part, entries: Sequence[Entry], path: Path) -> Path:
    """Draw one panel per axis and row: a part with one row has its axes side by side, another one its rows."""
    kinds = part.figure.get("x", ["round", *BYTES] if len(part.rows) == 1 else ["round"])
    rows = part.figure.get("rows", list(range(len(part.rows))))
    cells = [(kind, row) for kind in kinds for row in rows]
    across = len(rows) if 1 < len(rows) <= ACROSS else min(ACROSS, len(cells))
    with plt.rc_context(STYLE):
        figure, axes = panels(-(-len(cells) // across), across, share=len(rows) > 1)
        starts: dict[Any, list[float]] = {}
        for axis, (kind, row) in zip(np.ravel(axes), cells, strict=False):
            here = [entry for entry in entries if entry.row == row]
            axis.set_title(part.rows[row].label)
            axis.set_xscale("linear" if kind == "round" else "log")
            axis.set_yscale("linear" if part.goal == "max" else "log")
            if kind in AXES:
                starts[axis] = _curves(axis, part, here, kind, part.metric, unit_of(entries))
            else:
                _grid(axis, part, here, kind)
        for line in axes:
            line[0].set_ylabel(titled(part.metric))
        for axis in np.ravel(axes)[len(cells) :]:
            axis.set_visible(False)
        for axis in starts if part.goal == "min" else ():
            # a run that diverges leaves its panel; after all are drawn, because panels may share their limits
            peers = axis.get_shared_y_axes().get_siblings(axis)
            if beside := [top for peer in peers for top in starts.get(peer, [])]:
                axis.set_ylim(top=min(axis.get_ylim()[1], 3 * max(beside)))
        return save(figure, path, handles(axes))


def compare(part: Part, entries: Sequence[Entry], kind: Axis, metric: str, axis: Any = None) -> Any:
    """Draw a metric of every variant against a cost on one axis; the budget is a dotted line."""
    axis, unit = axis or plt.subplots(layout="constrained")[1], unit_of(entries)
    _curves(axis, part, entries, kind, metric, unit)
    if part.budget is not None and kind in part.budget.limits:
        limit = part.budget.limits[kind] / (unit[1] if kind in BYTES else 1.0)
        axis.axvline(limit, color="0.5", ls=":", lw=1)
    axis.set_ylabel(titled(metric))
    axis.legend(frameon=False)
    return axis


def _look(part: Part, entry: Entry) -> dict[str, Any]:
    """Return color, label and marker of an entry. Markers are staggered, so that lines on top of each other show."""
    number = [variant.name for variant in part.variants].index(entry.variant)
    marker = MARKERS[number % len(MARKERS)]
    return {
        "color": entry.series.color,
        "label": entry.series.label,
        "marker": marker,
        "ms": 9 if marker == "*" else 5,
        "mec": "white",
        "mew": 0.6,
        "ls": ("-", "--", ":", "-.")[number // len(MARKERS) % 4],
        "markevery": (0.03 + 0.22 * number / len(part.variants), 0.22),
    }


def _curves(
    axis: Any,
    part: Part,
    entries: Sequence[Entry],
    kind: Axis,
    metric: str,
    unit: tuple[str, float],
) -> list[float]:
    """Draw a metric of every variant against a cost; a cross marks where a seed diverged. Return the first values."""
    tops: list[float] = []
    for entry in entries:
        curve = entry.series.curve(metric)
        x = curve.spent[kind] / (unit[1] if kind in BYTES else 1.0)
        whole = (x > 0) | (axis.get_xscale() == "linear")
        x, values = x[whole], scale_of(metric) * curve.values[:, whole]
        middle = band(axis, x, values, **_look(part, entry))
        tops += [float(middle[0])] if len(middle) and np.isfinite(middle[0]) else []
        if any(t is not None for t in curve.diverged) and np.isfinite(middle).any():
            last, cross = int(np.flatnonzero(np.isfinite(middle))[-1]), {"ms": 7, "mew": 2}
            color = entry.series.color
            axis.plot(x[last], tops[-1], marker="x", color=color, clip_on=False, **cross)
    axis.set_xlabel(AXES[kind].format(unit[0]))
    return tops


def _grid(axis: Any, part: Part, entries: Sequence[Entry], key: str) -> None:
    """Draw the result of every point of a grid against one of its settings."""
    for entry in entries:
        points = [(one.point[key], one.end) for one in entry.tried if key in one.point]
        ends = [scale_of(part.tune_metric) * end.mean if end.whole else np.nan for _, end in points]
        look = _look(part, entry) | {"markevery": None}
        axis.plot([x for x, _ in points], ends, lw=1.4, **look)
    axis.set_xlabel(f"{key.rpartition('.')[2]} (no point: diverged)")


def heatmap(held: Holdings, title: str, path: Path) -> Path:
    """Draw examples by client and class; the format is that of the file's ending, PNG if it has none."""
    path = path if path.suffix else path.with_suffix(".png")
    clients, classes = held.counts.shape
    size = (min(12.0, 2.5 + 0.22 * classes), min(10.0, 1.5 + 0.16 * clients))
    with plt.rc_context(STYLE | {"axes.grid": False}):
        figure = Figure(size, layout="constrained")
        axis: Any = figure.subplots()
        picture = axis.imshow(held.counts, aspect="auto", cmap="viridis", interpolation="nearest")
        figure.colorbar(picture, label="examples")
        axis.set(xlabel="class" if held.classes else "", ylabel="client", title=title)
        if clients <= NAMED:
            axis.set_yticks(range(clients), held.clients)
        if not held.classes or classes <= NAMED:
            turned = max(map(len, held.classes), default=0) > 2
            axis.set_xticks(range(len(held.classes)), held.classes, rotation=90 if turned else 0)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, bbox_inches="tight", dpi=150)
    return path
