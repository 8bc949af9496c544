"""Dividing examples in Python gives the clients of a spec with the same partition, with names where there are any."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fedspan
from fedspan.core.errors import DataError, SpecError
from fedspan.core.spec import Spec
from fedspan.tasks.classification import Classification

CALLS: dict[str, dict[str, Any]] = {
    "iid": {"clients": 5},
    "dirichlet": {"clients": 5, "alpha": 0.1},
    "classes": {"clients": 5, "classes_per_client": 3},
    "quantity": {"clients": 5, "alpha": 0.3},
}


@pytest.mark.parametrize(("name", "settings"), CALLS.items())
def test_the_clients_are_those_of_a_spec(name: str, settings: dict[str, Any]) -> None:
    train, _ = fedspan.data.digits()
    divide = getattr(fedspan.data, name)
    parts = divide(train.y, **settings, seed=3)
    task = {"name": "classification", "data": "digits", "partition": {"name": name, **settings}}
    spec = Spec.from_table(
        {"rounds": 1, "seed": 3, "method": {"name": "fedavg", "lr": 0.1}, "task": task}
    )
    assert isinstance(spec.task, Classification)
    counts = np.stack([np.bincount(train.y[part], minlength=10) for part in parts])
    assert np.array_equal(counts, spec.task.holdings(3).counts)
    again = divide(torch.from_numpy(train.y), **settings, seed=3)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    assert any(
        not np.array_equal(a, b)
        for a, b in zip(parts, divide(train.y.tolist(), **settings), strict=True)
    )


def test_groups_become_named_clients() -> None:
    groups = ["Oslo", "Bergen", "Oslo", "Tromsø", "Bergen", "Oslo"]
    parts = fedspan.data.natural(groups)
    assert {name: part.tolist() for name, part in parts.items()} == {
        "Bergen": [1, 4],
        "Oslo": [0, 2, 5],
        "Tromsø": [3],
    }
    assert list(fedspan.data.natural(np.array([7, 3, 7]))) == ["3", "7"]
    assert list(fedspan.data.natural(groups, clients=2)) == ["Bergen", "Oslo"]


def test_groups_to_a_trained_model() -> None:
    """As a user writes it: a column of metadata decides who has which rows."""
    train, test = fedspan.data.digits()
    x = torch.tensor(train.x / 255, dtype=torch.float32).flatten(1)
    parts = fedspan.data.natural(np.where(np.arange(len(x)) % 3, "ward A", "ward B"))
    clients = {name: (x[part], torch.tensor(train.y[part])) for name, part in parts.items()}
    held_out = (torch.tensor(test.x / 255, dtype=torch.float32).flatten(1), test.y)
    method = fedspan.methods.FedAvg(lr=0.5, local_steps=20)
    result = fedspan.fit(torch.nn.Linear(64, 10), clients, method=method, rounds=5, test=held_out)
    assert result.history[-1]["accuracy"] > 0.8


def test_mistakes_are_named() -> None:
    with pytest.raises(DataError, match=r"`labels` must be a column .* shape \(2, 2\)"):
        fedspan.data.iid(np.zeros((2, 2)))
    with pytest.raises(DataError, match="`groups` must be a column"):
        fedspan.data.natural([])
    with pytest.raises(SpecError, match="`clients` is 4, but there are only 3 examples"):
        fedspan.data.dirichlet([0, 1, 1], clients=4)
    with pytest.raises(SpecError, match="`clients` is 3, but the data set has 2 natural clients"):
        fedspan.data.natural([0, 1, 1], clients=3)
    with pytest.raises(SpecError, match="`alpha` must be a positive number"):
        fedspan.data.quantity([0, 1, 1], clients=2, alpha=-1)
