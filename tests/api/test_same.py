"""`fit` is `run`: the same problem as objects and as a module gives the same bits, and what changed is noticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import fedspan
from fedspan.core.errors import CheckpointError
from support.fitting import blobs, flat, net, ssf, together
from support.loops import Interrupt

MODULE = """
from support.fitting import blobs, net, together

def model():
    return net()

def data(client):
    return blobs()[client]

def test():
    return together(blobs(seed=1))
"""
METHOD = {
    "name": "ssf",
    "lr": 0.1,
    "local_steps": 4,
    "space": {"name": "coordinate", "rank": 0.25},
}


def test_objects_and_a_module_are_the_same_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    table = {
        "rounds": 4,
        "clients_per_round": 2,
        "method": METHOD,
        "training": {"clip": 0.5, "weight_decay": 0.01},
    }
    task = {"name": "custom", "module": str(tmp_path / "mine.py"), "clients": 4}
    ran = fedspan.run(table | {"task": task})
    fitted = fedspan.fit(
        net(), blobs(), method=METHOD, rounds=4, clients_per_round=2, test=together(blobs(seed=1)),
        training=fedspan.Training(clip=0.5, weight_decay=0.01),
    )  # fmt: skip
    assert ran.model is not None
    assert torch.equal(flat(ran.model), flat(fitted.model))  # type: ignore[arg-type]
    drop = ("seconds",)
    assert [{k: v for k, v in line.items() if k not in drop} for line in ran.history] == [
        {k: v for k, v in line.items() if k not in drop} for line in fitted.history
    ]


def first(batch: Any, generator: torch.Generator) -> Any:
    return batch[0] + 0.1 * torch.randn(batch[0].shape, generator=generator), batch[1]


def second(batch: Any, generator: torch.Generator) -> Any:
    return batch[0] + 0.2 * torch.randn(batch[0].shape, generator=generator), batch[1]


def absolute(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - torch.nn.functional.one_hot(targets, 4)).abs().mean()


def moved() -> Any:
    return [(x + 1, y) for x, y in blobs()]


def loaders(size: int) -> Any:
    return [DataLoader(TensorDataset(*client), batch_size=size) for client in blobs()]


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "augment": (
        {"training": fedspan.Training(augment=second)},
        r"training.augment = 'first#\w+', not 'second#\w+'",
    ),
    "loss": ({"loss": absolute}, "task.loss = its default, not 'absolute#"),
    "data": ({"clients": moved()}, "task.data = "),
    "batches of a loader": ({"clients": loaders(4)}, "task.data = "),
    "fewer clients": ({"clients": blobs()[:3]}, "task.clients = 4, not 3"),
    "batch size": ({"batch_size": 5}, "batch_size = its default, not 5"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_run_is_not_resumed_with_something_else(name: str, tmp_path: Path) -> None:
    change, words = CHANGES[name]
    settings: dict[str, Any] = {
        "clients": blobs(),
        "method": ssf(),
        "rounds": 6,
        "run_dir": tmp_path / "o",
    }
    settings |= {"training": fedspan.Training(augment=first)}
    settings |= {"clients": loaders(8)} if name == "batches of a loader" else {}
    with pytest.raises(KeyboardInterrupt):
        fedspan.fit(net(), **settings, callbacks=[Interrupt(3)])
    with pytest.raises(CheckpointError, match=words):
        fedspan.fit(net(), **(settings | change), resume=True)
    assert fedspan.fit(net(), **settings, resume=True).finished
