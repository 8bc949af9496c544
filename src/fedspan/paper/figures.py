"""Figures of a study: error against rounds, against bytes, and against the step size."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from fedspan.paper.results import Results
from fedspan.paper.study import Part

DASHES = {1: ":", 5: "--"}  # ranks other than the usual one, where one figure shows several
TOP, POINTS = 3.0, 120  # upper end of the error axis; points of a curve
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "svg.hashsalt": "fedspan",
}


def draw(results: Results, part: Part, folder: Path) -> Path | None:
    """The figure of a part as PNG and SVG; the path of the SVG, or None where a part has none."""
    with plt.rc_context(STYLE):
        if part.kind == "tuned":
            figure = _steps(results, part)
        elif "figure" in part.table:
            figure = _curves(results, part)
        else:
            return None
        path = folder / f"{part.name}.svg"
        figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
        figure.savefig(path.with_suffix(".png"), bbox_inches="tight", dpi=150)
        plt.close(figure)
    return path


def _panels(down: int, across: int) -> tuple[Any, Any]:
    size = (1.2 + 3.5 * across, 0.3 + 2.9 * down)
    return plt.subplots(down, across, figsize=size, squeeze=False, layout="constrained")


AXES: dict[str, tuple[str, Any]] = {
    "round": ("round", lambda curve: curve.rounds),
    "up": ("MB sent up, all clients", lambda curve: curve.up / 1e6),
    "bytes": ("MB sent, both directions, all clients", lambda curve: (curve.up + curve.down) / 1e6),
}


def _curves(results: Results, part: Part) -> Any:
    wanted = part.table["figure"]
    figure, axes = _panels(len(wanted["x"]), len(wanted["rows"]))
    for line, kind in zip(axes, wanted["x"], strict=True):
        for axis, number in zip(line, wanted["rows"], strict=True):
            _panel(results, part, axis, part.table["rows"][number], kind)
        line[0].set_ylabel("relative error")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside right center")
    return figure


def _panel(results: Results, part: Part, axis: Any, row: dict[str, Any], kind: str) -> None:
    """One panel: all variants of a row, mean line and band from the lowest to the highest seed."""
    lr, floor = results.steps()[row["het"]], np.inf
    name, values = AXES[kind]
    for variant in part.variants(row):
        curve = results.curve(results.study.case(variant, row, lr, results.study.rounds(part)))
        keep = _thinned(len(curve.rounds), logarithmic=kind != "round")
        x, errors = values(curve)[keep], curve.errors[:, keep]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # rows in which every seed has diverged are all nan
            middle, low, high = (f(errors, 0) for f in (np.nanmean, np.nanmin, np.nanmax))
        colour = results.study.colour(variant)
        axis.plot(x, middle, color=colour, lw=1.2, label=results.study.label(variant))
        axis.fill_between(x, low, high, color=colour, alpha=0.15, lw=0)
        floor = min(floor, np.nanmin(middle))
        if any(curve.diverged):
            axis.plot(
                x[int(np.isfinite(middle).sum()) - 1], TOP / 1.3, marker="x", color=colour, ms=7, mew=2, clip_on=False
            )
    axis.set_yscale("log")
    axis.set_xscale("linear" if kind == "round" else "log")
    axis.set_ylim(floor * 0.7, TOP)
    axis.set_title(f"het = {row['het']:g}, r = {row['rank']}, η = {lr:g}")
    axis.set_xlabel(name)


def _thinned(rows: int, logarithmic: bool) -> Any:
    """At most POINTS row numbers, evenly spread on the axis they will be drawn on; a logarithmic one has no zero."""
    if not logarithmic:
        return np.unique(np.linspace(0, rows - 1, min(rows, POINTS)).astype(int))
    return np.unique(np.geomspace(1, rows - 1, min(rows, POINTS)).astype(int))


def _steps(results: Results, part: Part) -> Any:
    rows, grid, rounds = part.table["rows"], part.table["grid"], results.study.rounds(part)
    levels = list(dict.fromkeys(row["het"] for row in rows))
    figure, (axes,) = _panels(1, len(levels))
    drawn: dict[str, Any] = {}
    for axis, het in zip(axes, levels, strict=True):
        for row in (row for row in rows if row["het"] == het):
            for variant in part.variants(row):
                rank = results.study.case(variant, row, grid[0], rounds).rank
                name = results.study.label(variant) + ("" if rank is None else f", r = {rank}")
                tails = [results.tail(results.study.case(variant, row, lr, rounds)) for lr in grid]
                errors = [np.nan if tail.diverged else tail.mean for tail in tails]
                style = {"color": results.study.colour(variant), "ls": DASHES.get(rank or 0, "-")}
                drawn[name] = axis.plot(grid, errors, marker="o", ms=4, lw=1.2, label=name, **style)[0]
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_title(f"het = {het:g}, {rounds:,} rounds")
        axis.set_xlabel("local step η (no point: diverged)")
    axes[0].set_ylabel("tail error")
    figure.legend(handles=list(drawn.values()), fontsize=8, loc="outside right center")
    return figure
