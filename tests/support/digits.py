"""A model with clients' data that comparisons are made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from fedspan import Projection

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
