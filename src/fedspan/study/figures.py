"""Figures of a comparison: the metric against rounds, uplink bytes and all bytes; and against client memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from fedspan.study.curves import TITLES, Axis, over_seeds, thinned
from fedspan.study.memory import client_memory
from fedspan.study.outcome import Outcome
from fedspan.study.tables import MEMORY, scale_of, titled

STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "svg.hashsalt": "fedspan",
}
AXES: dict[Axis, float] = {"round": 1.0, "up": 1e-6, "total": 1e-6}  # bytes as MB


def panels(down: int, across: int) -> tuple[Any, Any]:
    """A figure of panels, each of the size that all our figures have."""
    size = (1.2 + 3.5 * across, 0.3 + 2.9 * down)
    return plt.subplots(down, across, figsize=size, squeeze=False, layout="constrained")


def save(figure: Any, path: Path) -> Path:
    """As PNG and SVG; the path of the SVG."""
    figure.savefig(path.with_suffix(".svg"), bbox_inches="tight", metadata={"Date": None})
    figure.savefig(path.with_suffix(".png"), bbox_inches="tight", dpi=150)
    plt.close(figure)
    return path.with_suffix(".svg")


def band(axis: Any, x: Any, values: Any, color: str, label: str) -> Any:
    """Mean line of several seeds and a band from the lowest to the highest; the mean."""
    middle, low, high = over_seeds(values)
    axis.plot(x, middle, color=color, lw=1.2, label=label)
    axis.fill_between(x, low, high, color=color, alpha=0.15, lw=0)
    return middle


def draw(outcome: Outcome, path: Path) -> Path:
    """The metric of every variant against rounds, uplink and all bytes, side by side."""
    plan = outcome.comparison
    with plt.rc_context(STYLE):
        figure, (line,) = panels(1, len(AXES))
        for axis, (kind, unit) in zip(line, AXES.items(), strict=True):
            logarithmic = kind != "round"
            for variant in plan.variants:
                curve = outcome.curve(variant)
                keep = thinned(len(curve.rounds), logarithmic)
                x = curve.spent(kind)[keep] * unit
                scale = scale_of(plan.metric)
                band(axis, x, scale * curve.values[:, keep], variant.color, variant.label)
            axis.set_xscale("log" if logarithmic else "linear")
            axis.set_yscale("linear" if plan.goal == "max" else "log")
            axis.set_xlabel(TITLES[kind].format("MB"))
            if logarithmic:
                axis.axvline(outcome.budget(kind) * unit, color="#888888", lw=0.8, ls=":")
        line[0].set_ylabel(titled(plan.metric))
        handles, labels = line[0].get_legend_handles_labels()
        figure.legend(handles, labels, fontsize=8, loc="outside right center")
        return save(figure, path)


def draw_memory(outcome: Outcome, path: Path) -> Path | None:
    """The result of every variant against client memory, whiskers over the seeds; None where it is not known."""
    plan = outcome.comparison
    held = {variant.name: client_memory(outcome.series(variant).table) for variant in plan.variants}
    if all(size is None for size in held.values()):
        return None
    scale = scale_of(plan.metric)
    with plt.rc_context(STYLE):
        figure, ((axis,),) = panels(1, 1)
        figure.set_figwidth(7)  # of which the legend takes half
        for variant in plan.variants:
            ends, size = scale * outcome.within(variant).ends(plan.tail), held[variant.name]
            if size is not None and np.isfinite(ends).all():
                reach = [[ends.mean() - ends.min()], [ends.max() - ends.mean()]]
                style = {"fmt": "o", "ms": 5, "lw": 1.2, "capsize": 3}
                axis.errorbar(size / 1e6, ends.mean(), reach, color=variant.color, label=variant.label, **style)
        axis.set_xlabel(MEMORY)
        axis.set_ylabel(titled(plan.metric))
        figure.legend(*axis.get_legend_handles_labels(), fontsize=8, loc="outside right center")
        return save(figure, path)
