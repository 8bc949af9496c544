"""Small clients, networks and methods for `fedspan.fit`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from support.methods import build

COORDINATE = {"name": "coordinate", "rank": 0.25}


def blobs(
    clients: int = 4, examples: int = 40, classes: int = 4, seed: int = 0
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each client has mostly two classes of well separated points in 20 dimensions."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(classes, 20)) * 2
    found = []
    for client in range(clients):
        y = rng.choice([client % classes, (client + 1) % classes], examples)
        x = centres[y] + rng.normal(size=(examples, 20))
        found.append((torch.tensor(x, dtype=torch.float32), torch.tensor(y)))
    return found


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
    )


def ssf(**settings: Any) -> Any:
    return build("ssf", **({"lr": 0.1, "local_steps": 4, "projector": COORDINATE} | settings))


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def together(data: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
