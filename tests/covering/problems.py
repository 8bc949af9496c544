"""The small problems of the covering runs: a regression from a file, and networks from a module."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

CLIENTS = 6
ORDER = [3, 0, 5, 1, 4, 2]
SCALE = 1024.0  # a power of two, which changes no rounding
TASKS = (
    "regression",
    "uneven regression",
    "network",
    "uneven network",
    "running statistics",
    "dropout",
)
Variant = Literal[
    "", "scaled", "ordered", "alike"
]  # targets times SCALE; clients in another order; all the same
HERE = tempfile.TemporaryDirectory(prefix="covering-")
MODULE = """
import torch
from covering import problems
model = problems.{model}
def data(client): return problems.examples({client}, {uneven})
def test(): return problems.examples(99, {uneven})
if {uneven}: loss = torch.nn.functional.mse_loss
"""


@functools.cache
def task_table(task: str, variant: Variant = "") -> dict[str, Any]:
    """The table of a task."""
    uneven, place = "uneven" in task, Path(HERE.name) / f"{task} {variant}".replace(" ", "_")
    if "regression" in task:
        np.savez(place.with_suffix(".npz"), **_regression(uneven, variant))
        return {"name": "regression", "data": str(place.with_suffix(".npz"))}
    client = {"ordered": f"{ORDER}[client]", "alike": "0"}.get(variant, "client")
    model = {
        "running statistics": "with_statistics",
        "dropout": "with_dropout",
        "uneven network": "smooth",
    }.get(task, "plain")
    place.with_suffix(".py").write_text(MODULE.format(model=model, client=client, uneven=uneven))
    return {"name": "custom", "module": str(place.with_suffix(".py")), "clients": CLIENTS}


def _regression(uneven: bool, variant: Variant) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    a = draw.normal(size=(CLIENTS, 9, 12)) + draw.normal(size=(CLIENTS, 1, 12))
    b = 0.1 * a @ (draw.normal(size=(12, 2)) + 0.5 * draw.normal(size=(CLIENTS, 12, 2)))
    n = np.array([5, 9, 7, 6, 9, 8] if uneven else [9] * CLIENTS)
    order = {"ordered": ORDER, "alike": [0] * CLIENTS}.get(variant, list(range(CLIENTS)))
    return {"A": a[order], "B": (SCALE if variant == "scaled" else 1.0) * b[order], "n": n[order]}


def examples(client: int, uneven: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs around the center of their class; clients have two classes of three, or numbers to predict."""
    draw = torch.Generator().manual_seed(client)
    count = 8 + 2 * (client % 3) if uneven else 12
    y = (torch.randint(0, 2, (count,), generator=draw) + client) % 3
    centers = torch.eye(3, 8) * 2
    x = centers[y] + 0.5 * torch.randn(count, 8, generator=draw)
    return x, (x[:, :3].sin() if uneven else y)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))


def smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))


def with_statistics() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.3), nn.Linear(6, 3))


def jitter(batch: Any, generator: torch.Generator) -> Any:
    """Noise on the inputs."""
    x, y = batch
    return x + 0.1 * torch.randn(x.shape, dtype=x.dtype, generator=generator), y
