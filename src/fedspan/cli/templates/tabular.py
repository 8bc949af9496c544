"""Rows of numbers: the model, each client's data, and the test set.

The sample is scikit-learn's breast_cancer: 569 samples, 30 features, benign or not. Each client has tumors of another
size.
"""

import os
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

CLIENTS = 5
DATA = Path(os.environ.get("MY_PROJECT_DATA", Path(__file__).parents[1] / "data"))
Data = tuple[torch.Tensor, torch.Tensor]


def model() -> nn.Module:
    """30 features in, scores of 2 classes out."""
    return nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 2))


def data(client: int) -> Data:
    """One client's examples: (inputs, classes)."""
    return _read(DATA / f"client-{client}.csv") if DATA.is_dir() else _sample(client)


def test() -> Data:
    """What the server evaluates on."""
    return _read(DATA / "test.csv") if DATA.is_dir() else _sample(CLIENTS)


def _read(file: Path) -> Data:
    """A file with a line of names, then one row per example, the class last."""
    rows = np.loadtxt(file, delimiter=",", skiprows=1, ndmin=2)
    return torch.tensor(rows[:, :-1], dtype=torch.float32), torch.tensor(rows[:, -1], dtype=torch.int64)


def _sample(part: int) -> Data:
    found = load_breast_cancer()
    inputs = (found.data - found.data.mean(0)) / found.data.std(0)
    order = np.argsort(inputs[:450, 0], kind="stable")
    rows = [*np.array_split(order, CLIENTS), np.arange(450, len(inputs))][part]
    return torch.tensor(inputs[rows], dtype=torch.float32), torch.tensor(found.target[rows])
