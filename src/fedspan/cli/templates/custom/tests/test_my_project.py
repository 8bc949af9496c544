"""The data fit the model, and two rounds run: `python -m pytest`."""

from pathlib import Path

import torch
from my_project import task

import fedspan

SPEC = Path(__file__).parents[1] / "spec.toml"


def test_the_data_fit_the_model() -> None:
    """Of every client, and of the server."""
    model = task.model()
    for inputs, targets in [*(task.data(client) for client in range(task.CLIENTS)), task.test()]:
        assert len(inputs) == len(targets)
        assert len(model(inputs[:2])) == 2


def test_two_rounds() -> None:
    """The loss falls."""
    result = fedspan.run(fedspan.Spec.load(SPEC, ("rounds=2", "eval_every=1")))
    losses = [row["loss"] for row in result.history]
    assert losses[-1] < losses[0]
    assert torch.isfinite(torch.tensor(losses)).all()
