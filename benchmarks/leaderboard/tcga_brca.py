"""The hospitals of six regions: a Cox model with one hidden layer, for a spec with `module = "tcga_brca.py"`."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

import fedspan


@functools.cache
def _splits() -> tuple[list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The patients of each region, every fifth of them for validation, and the test patients, as scaled features."""
    train, other = fedspan.data.tcga_brca()
    mean, deviation = train.x.mean(0), train.x.std(0)
    deviation[deviation == 0] = 1
    x, x_test = (torch.from_numpy((one.x - mean) / deviation) for one in (train, other))
    y, y_test = torch.from_numpy(train.y), torch.from_numpy(other.y)
    regions = [torch.as_tensor(rows) for rows in fedspan.data.natural(train.owner).values()]
    held_out = torch.cat([rows[::5] for rows in regions])
    kept = [rows[torch.arange(len(rows)) % 5 > 0] for rows in regions]
    return [(x[rows], y[rows]) for rows in kept], (x[held_out], y[held_out]), (x_test, y_test)


def model() -> nn.Module:
    """Return the risk of a patient, up to a constant."""
    return nn.Sequential(nn.Linear(39, 64), nn.ReLU(), nn.Linear(64, 1))


def data(client: int) -> tuple[Tensor, Tensor]:
    """Return the patients of a region."""
    return _splits()[0][client]


def validation() -> tuple[Tensor, Tensor]:
    """Return the patients that are held out of all regions."""
    return _splits()[1]


def test() -> tuple[Tensor, Tensor]:
    """Return the test patients of all regions."""
    return _splits()[2]


def loss(risks: Tensor, targets: Tensor) -> Tensor:
    """The negative Cox partial likelihood of a mini-batch; a target is (time, event)."""
    order = torch.argsort(targets[:, 0], descending=True, stable=True)
    risks, event = risks.flatten()[order], targets[order, 1]
    return (event * (torch.logcumsumexp(risks, 0) - risks)).mean()
