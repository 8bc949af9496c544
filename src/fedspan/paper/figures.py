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


def _panels(count: int) -> tuple[Any, list[Any]]:
    figure, axes = plt.subplots(
        1, count, figsize=(1.2 + 3.5 * count, 3.2), sharey=False, squeeze=False, layout="constrained"
    )
    return figure, list(axes[0])


def _curves(results: Results, part: Part) -> Any:
    wanted = part.table["figure"]
    steps, rounds = results.steps(), results.study.rounds(part)
    figure, axes = _panels(len(wanted["rows"]))
    for axis, number in zip(axes, wanted["rows"], strict=True):
        row = part.table["rows"][number]
        floor = np.inf
        for variant in part.variants(row):
            curve = results.curve(results.study.case(variant, row, steps[row["het"]], rounds))
            x = curve.rounds if wanted["x"] == "round" else (curve.up + curve.down) / 1e6
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # rows in which every seed has diverged are all nan
                middle, low, high = (f(curve.errors, 0) for f in (np.nanmean, np.nanmin, np.nanmax))
            colour = results.study.colour(variant)
            axis.plot(x, middle, color=colour, lw=1.2, label=results.study.label(variant))
            axis.fill_between(x, low, high, color=colour, alpha=0.15, lw=0)
            floor = min(floor, np.nanmin(middle))
            end = int(np.isfinite(middle).sum())
            if end < len(middle) or any(curve.diverged):
                axis.plot(x[end - 1], min(middle[end - 1], 10), marker="x", color=colour, ms=7, mew=2)
        axis.set_yscale("log")
        axis.set_ylim(floor * 0.7, 3)
        axis.set_title(f"het = {row['het']:g}, r = {row['rank']}, η = {steps[row['het']]:g}")
        axis.set_xlabel("round" if wanted["x"] == "round" else "MB sent, both directions, all clients")
        if wanted["x"] == "bytes":
            axis.set_xscale("log")
    axes[0].set_ylabel("relative error")
    axes[-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
    return figure


def _steps(results: Results, part: Part) -> Any:
    rows, grid, rounds = part.table["rows"], part.table["grid"], results.study.rounds(part)
    levels = list(dict.fromkeys(row["het"] for row in rows))
    figure, axes = _panels(len(levels))
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
    axes[-1].legend(handles=list(drawn.values()), fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
    return figure
