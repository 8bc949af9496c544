"""Figures of the trial: what was measured against what the theory predicts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

import claims
import lemmas
from fedspan.study.figures import STYLE, band, panels, save
from runs import Run

COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")


def draw(name: str, runs: list[Run], path: Path) -> Path | None:
    """The figure of an experiment as PNG and SVG; None if it has none."""
    if name not in FIGURES:
        return None
    with plt.rc_context(STYLE):
        figure, ((axis,),) = panels(1, 1)
        FIGURES[name](axis, runs)
        return save(figure, path)


def _drift(axis: Any, runs: list[Run]) -> None:
    for run, color in zip(runs, COLORS, strict=False):
        axis.plot(
            run.rounds,
            claims.drift_ratio(run),
            color=color,
            label=f"ρ = {claims.rank(run) / 100:g}",
        )
    axis.axhline(1, color="#888888", lw=0.8, ls=":")
    _named(axis, "round", "drift / Lemma 2's bound")


def _contraction(axis: Any, runs: list[Run]) -> None:
    for run, color in zip(runs, COLORS, strict=False):
        rho, share = claims.rank(run) / 40, run.point["clients_per_round"] / 20
        label = f"ρ = {rho:g}, S/N = {share:g}"
        values = run.metrics["control_error"]
        start = band(axis, run.rounds, values, color, label)[0]
        axis.plot(
            run.rounds,
            start * lemmas.contraction_sampled(rho, share) ** run.rounds,
            color=color,
            ls="--",
            lw=0.8,
        )
    _named(axis, "round", "C_t; dashed: (1 − ρS/N)^t")


def _floor(axis: Any, runs: list[Run]) -> None:
    for run, color in zip(runs, COLORS, strict=False):
        rho, steps, sigma2 = claims.rank(run) / 40, run.spec.method.local_steps, claims.noise(run)
        band(axis, run.rounds, run.metrics["control_error"], color, f"ρ = {rho:g}")
        axis.axhline(6 * sigma2 / (rho * steps), color=color, ls=":", lw=0.8)
        axis.axhline(sigma2 / steps, color="#888888", ls="--", lw=0.8)
    _named(axis, "round", "C_t; dotted: 6σ²/(ρK), dashed: σ²/K")


def _power(
    of: Callable[[Run], float], slope: float, x_name: str, y_name: str, floor: bool = True
) -> Any:
    def drawn(axis: Any, runs: list[Run]) -> None:
        x = np.array([of(run) for run in runs])
        y = np.stack([claims.floors(run) if floor else claims.rounds_to(run, 0.01) for run in runs])
        band(axis, x, y.T, COLORS[0], "measured")
        axis.plot(
            x,
            y.mean(1)[0] * (x / x[0]) ** slope,
            color="#888888",
            ls="--",
            lw=0.8,
            label=f"slope {slope:g}",
        )
        axis.set_xscale("log")
        _named(axis, x_name, y_name)

    return drawn


def _curves(metric: str, label: Callable[[Run], str], y_name: str) -> Any:
    def drawn(axis: Any, runs: list[Run]) -> None:
        for run, color in zip(runs, COLORS, strict=False):
            values = np.maximum(run.metrics[metric] / run.metrics[metric][:, :1], 1e-30)
            band(axis, run.rounds, values, color, label(run))
        _named(axis, "round", y_name)

    return drawn


def _transient(axis: Any, runs: list[Run]) -> None:
    for run, color in zip(runs, COLORS, strict=False):
        band(axis, run.rounds, run.metrics["rel_err"], color, f"r = {claims.rank(run)}")
        for model, style in (("mean field", "--"), ("narrow", ":")):
            ahead = claims.predicted_error(run, model)  # type: ignore[arg-type]
            axis.plot(run.rounds, ahead, color=color, ls=style, lw=0.9)
    for model, style in (("mean field", "--"), ("narrow", ":")):
        axis.plot([], [], color="#888888", ls=style, lw=0.9, label=model)
    axis.set_ylim(3e-3, 1.5)
    _named(axis, "round", "relative error")


def _named(axis: Any, x: str, y: str) -> None:
    axis.set_yscale("log")
    axis.set_xlabel(x)
    axis.set_ylabel(y)


FIGURES: dict[str, Callable[[Any, list[Run]], None]] = {
    "drift": _drift,
    "contraction": _contraction,
    "floor": _floor,
    "clients": _power(
        lambda run: 4 * run.point["task.clients"], -1, "N·K, K = 4", "floor of ‖∇F‖²"
    ),
    "steps": _power(
        lambda run: 8 * run.point["method.local_steps"], -1, "N·K, N = 8", "floor of ‖∇F‖²"
    ),
    "share_floor": _power(lambda run: claims.rank(run) / 20, -1, "ρ", "floor of ‖∇F‖²"),
    "share_rate": _power(
        lambda run: claims.rank(run) / 40, -1, "ρ", "rounds to ‖∇F‖²/100", floor=False
    ),
    "heterogeneity": _curves(
        "grad_sq",
        lambda run: f"{run.point['method.name']}, target_het {run.point['task.target_het']:g}",
        "‖∇F‖² / start",
    ),
    "sampling": _curves(
        "grad_sq",
        lambda run: f"{run.point['method.drift.rule']}, S = {run.point['clients_per_round']}",
        "‖∇F‖² / start",
    ),
    "transient": _transient,
}
