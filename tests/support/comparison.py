"""A spec file, and a model with clients' data, that comparisons are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from torch import nn

from conftest import SMALL
from fedspan import Projection

GAUSSIAN = {"name": "gaussian", "rank": 3}
BASE: dict[str, Any] = {
    "rounds": 12,
    "eval_every": 2,
    "method": {"name": "ssf", "lr": 0.02, "local_steps": 2}
    | {"local": {"name": "sgd", "momentum": 0.5}, "space": GAUSSIAN, "drift": {"name": "controls"}},
    "task": SMALL,
    "batch_size": 4,
    "clients_per_round": 3,
}


def spec_file(place: Path, name: str = "base.toml", **changes: Any) -> Path:
    path = place / name
    path.write_text(tomli_w.dumps(BASE | changes))
    return path


Data = tuple[torch.Tensor, torch.Tensor]


def digits() -> tuple[nn.Module, list[Data], Data, Data]:
    """A model, five clients with few classes each, a validation set and a test set."""
    draw = np.random.default_rng(0)
    y = np.repeat(np.arange(5), 40)
    x = torch.tensor(
        np.eye(5)[y] @ draw.normal(size=(5, 12)) + 0.7 * draw.normal(size=(200, 12)),
        dtype=torch.float32,
    )
    parts = np.arange(200).reshape(5, 40)
    clients = [(x[part[:24]], torch.tensor(y[part[:24]])) for part in parts]
    validation, test = (
        np.concatenate([part[a:b] for part in parts]) for a, b in ((24, 32), (32, 40))
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5))
    return (
        model,
        clients,
        (x[validation], torch.tensor(y[validation])),
        (x[test], torch.tensor(y[test])),
    )


MODEL, CLIENTS, VALIDATION, TEST = digits()
SETTINGS: dict[str, Any] = {
    "test": TEST,
    "batch_size": 8,
    "eval_every": 2,
    "projection": Projection(min_numel=16),
}
