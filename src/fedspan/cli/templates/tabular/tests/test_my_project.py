"""The tables make clients, and two rounds run: `python -m pytest`."""

from pathlib import Path

import torch

import fedspan

SPEC = Path(__file__).parents[1] / "spec.toml"


def test_the_tables_make_clients() -> None:
    """One for each file, with examples."""
    spec = fedspan.Spec.load(SPEC)
    held = spec.task.holdings(spec.seed)
    assert [*held.clients] == sorted(path.stem for path in (SPEC.parent / "data").glob("*.csv"))
    assert held.counts.sum(1).min() > 0


def test_two_rounds() -> None:
    """The loss falls, and every client is evaluated."""
    result = fedspan.run(fedspan.Spec.load(SPEC, ("rounds=2", "eval_every=1")))
    losses = [row["loss"] for row in result.history]
    assert losses[-1] < losses[0]
    assert torch.isfinite(torch.tensor(losses)).all()
    assert {row["client"] for row in result.per_client} == {
        path.stem for path in (SPEC.parent / "data").glob("*.csv")
    }
