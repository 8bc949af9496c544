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
FEATURES, CLASSES = 30, 2
DATA = Path(os.environ.get("MY_PROJECT_DATA", Path(__file__).parents[1] / "data"))
Data = tuple[torch.Tensor, torch.Tensor]


def model() -> nn.Module:
    """Features in, scores of the classes out. BatchNorm1d brings columns of any scale to mean 0 and variance 1."""
    return nn.Sequential(
        nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES)
    )


def data(client: int) -> Data:
    """One client's examples: (inputs, classes)."""
    return _read(DATA / f"client-{client}.csv") if DATA.is_dir() else _sample(client)


def test() -> Data:
    """What the server evaluates on."""
    return _read(DATA / "test.csv") if DATA.is_dir() else _sample(CLIENTS)


def _read(file: Path) -> Data:
    """A file with a line of names, then one row per example, the class last."""
    try:
        rows = np.loadtxt(file, delimiter=",", skiprows=1, ndmin=2, encoding="utf-8")
    except ValueError as error:
        wanted = "numbers separated by commas, the class last as 0, 1, …, in UTF-8"
        raise ValueError(f"{file} must have {wanted}: {error}") from None
    return torch.tensor(rows[:, :-1], dtype=torch.float32), torch.tensor(
        rows[:, -1], dtype=torch.int64
    )


def _sample(part: int) -> Data:
    found = load_breast_cancer()
    order = np.argsort(found.data[:450, 0], kind="stable")
    rows = [*np.array_split(order, CLIENTS), np.arange(450, len(found.data))][part]
    return torch.tensor(found.data[rows], dtype=torch.float32), torch.tensor(found.target[rows])
