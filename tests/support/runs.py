"""A spec of the toy problem, and constructed evaluations."""

from __future__ import annotations

from typing import Any

from fedspan.study.curves import Series
from support.loops import SMALL

TABLE: dict[str, Any] = {
    "rounds": 12,
    "eval_every": 2,
    "method": {
        "name": "ssf",
        "lr": 0.02,
        "local_steps": 2,
        "space": {"name": "gaussian", "rank": 3},
    },
    "task": SMALL,
    "batch_size": 4,
    "clients_per_round": 3,
}


def rows_of(values: list[float | None], up: int = 10) -> list[dict[str, Any]]:
    """Rows with given values of `loss`, and `up` bytes per round."""
    rows: list[dict[str, Any]] = [
        {"round": t, "up_bytes": up * t, "down_bytes": up * t, "seconds": 0.5 * t, "loss": value}
        for t, value in enumerate(values)
    ]
    if values[-1] is None:
        rows[-1]["diverged"] = True
    return rows


def series_of(runs: list[Any], label: str = "", rounds: int = 1) -> Series:
    """A series from the rows of each seed."""
    return Series.of(label, "", {"rounds": rounds}, range(len(runs)), runs)


def line(label: str, values: list[float | None], up: int = 10) -> Series:
    """A series of one seed."""
    return Series.of(label, "#0072B2", {"rounds": len(values) - 1}, (0,), [rows_of(values, up)])
