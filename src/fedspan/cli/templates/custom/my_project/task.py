"""A model and data of your own, with a loss of your own.

The sample is made up: five sensors whose readings differ, some of them wildly wrong. The Huber loss bears it.
"""

import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

CLIENTS = 5
DATA = Path(os.environ.get("MY_PROJECT_DATA", Path(__file__).parents[1] / "data"))
Data = tuple[torch.Tensor, torch.Tensor]


def model() -> nn.Module:
    """Any torch module; its initial weights are decided by the seed of the run."""
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """What is minimized: a mean over the examples of a mini-batch. Without it, it is cross-entropy."""
    return F.huber_loss(outputs, targets)


def data(client: int) -> Data:
    """One client's examples: (inputs, targets), or a Dataset or DataLoader of them."""
    return _read(DATA / f"client-{client}.npz") if DATA.is_dir() else _sample(client)


def test() -> Data:
    """What the server evaluates on."""
    return _read(DATA / "test.npz") if DATA.is_dir() else _sample(CLIENTS)


def _read(file: Path) -> Data:
    """Arrays x (n, 8) and y (n, 1)."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return torch.tensor(arrays["x"], dtype=torch.float32), torch.tensor(
                arrays["y"], dtype=torch.float32
            )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} must have the arrays x and y: {error}") from None


def _sample(part: int) -> Data:
    rng = np.random.default_rng(part)
    x = rng.normal(0.2 * part if part < CLIENTS else 0.5, 1, (200, 8))
    y = np.sin(x[:, :1]) + x[:, 1:2] + 0.1 * rng.normal(size=(200, 1))
    if part < CLIENTS:
        y[::20] += 10
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)
