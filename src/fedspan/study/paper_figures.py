"""Figures of a study: error against rounds, against bytes, and against the step size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from fedspan.study.curves import TITLES, Axis, thinned
from fedspan.study.figures import AXES, STYLE, band, panels, save
from fedspan.study.paper_results import Results
from fedspan.study.paper_study import Part

DASHES = {1: ":", 5: "--"}  # ranks other than the usual one, where one figure shows several
TOP = 3.0  # upper end of the error axis


def draw(results: Results, part: Part, folder: Path) -> Path | None:
    """The figure of a part as PNG and SVG; the path of the SVG, or None where a part has none."""
    with plt.rc_context(STYLE):
        if part.kind == "tuned":
            figure = _steps(results, part)
        elif "figure" in part.table:
            figure = _curves(results, part)
        else:
            return None
        return save(figure, folder / part.name)


def _curves(results: Results, part: Part) -> Any:
    wanted = part.table["figure"]
    figure, axes = panels(len(wanted["x"]), len(wanted["rows"]))
    for line, kind in zip(axes, wanted["x"], strict=True):
        for axis, number in zip(line, wanted["rows"], strict=True):
            _panel(results, part, axis, part.table["rows"][number], kind)
        line[0].set_ylabel("relative error")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside right center")
    return figure


def _panel(results: Results, part: Part, axis: Any, row: dict[str, Any], kind: Axis) -> None:
    """One panel: all variants of a row, mean line and band from the lowest to the highest seed."""
    lr, floor = results.steps()[row["het"]], np.inf
    for variant in part.variants(row):
        curve = results.curve(results.study.case(variant, row, lr, results.study.rounds(part)))
        keep = thinned(len(curve.rounds), logarithmic=kind != "round")
        x, color = curve.spent(kind)[keep] * AXES[kind], results.study.color(variant)
        middle = band(axis, x, curve.values[:, keep], color, results.study.label(variant))
        floor = min(floor, np.nanmin(middle))
        if any(curve.diverged):
            axis.plot(
                x[int(np.isfinite(middle).sum()) - 1], TOP / 1.3, marker="x", color=color, ms=7, mew=2, clip_on=False
            )
    axis.set_yscale("log")
    axis.set_xscale("linear" if kind == "round" else "log")
    axis.set_ylim(floor * 0.7, TOP)
    axis.set_title(f"het = {row['het']:g}, r = {row['rank']}, η = {lr:g}")
    axis.set_xlabel(TITLES[kind].format("MB"))


def _steps(results: Results, part: Part) -> Any:
    rows, grid, rounds = part.table["rows"], part.table["grid"], results.study.rounds(part)
    levels = list(dict.fromkeys(row["het"] for row in rows))
    figure, (axes,) = panels(1, len(levels))
    drawn: dict[str, Any] = {}
    for axis, het in zip(axes, levels, strict=True):
        for row in (row for row in rows if row["het"] == het):
            for variant in part.variants(row):
                rank = results.study.case(variant, row, grid[0], rounds).rank
                name = results.study.label(variant) + ("" if rank is None else f", r = {rank}")
                tails = [results.tail(results.study.case(variant, row, lr, rounds)) for lr in grid]
                errors = [np.nan if tail.diverged else tail.mean for tail in tails]
                style = {"color": results.study.color(variant), "ls": DASHES.get(rank or 0, "-")}
                drawn[name] = axis.plot(grid, errors, marker="o", ms=4, lw=1.2, label=name, **style)[0]
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_title(f"het = {het:g}, {rounds:,} rounds")
        axis.set_xlabel("local step η (no point: diverged)")
    axes[0].set_ylabel("tail error")
    figure.legend(handles=list(drawn.values()), fontsize=8, loc="outside right center")
    return figure
