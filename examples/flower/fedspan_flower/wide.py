"""Your own model and data for task "custom": here a network of 20 million numbers on handwritten digits."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn

HIDDEN, TEST = 4480, 297
Data = tuple[torch.Tensor, torch.Tensor]


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, 10),
    )


def data(client: int) -> Data:
    """Even digits at client 0, odd ones at client 1."""
    inputs, targets = _digits()
    inputs, targets = inputs[TEST:], targets[TEST:]
    mine = targets % 2 == client
    return inputs[mine], targets[mine]


def test() -> Data:
    inputs, targets = _digits()
    return inputs[:TEST], targets[:TEST]


def _digits() -> Data:
    found = load_digits()
    return torch.tensor(found.data / 16, dtype=torch.float32), torch.tensor(found.target)
