"""Which objective a run minimizes where clients have different weights and some of them take part."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import fedspan

SIZES = (66, 6, 6, 6, 6, 5, 5)  # one client has most of the data


def federation() -> tuple[list[Any], torch.Tensor]:
    """Clients whose targets differ, and the minimum of the mean loss over all examples."""
    draw = torch.Generator().manual_seed(3)
    clients, moments = [], []
    for number, size in enumerate(SIZES):
        x = torch.randn(size, 3, generator=draw)
        y = x @ torch.full((3, 1), float(number - 3)) + 0.1 * torch.randn(size, 1, generator=draw)
        clients.append((x, y))
        moments.append((x.T @ x / size, x.T @ y / size))
    square, cross = (
        sum(n * one for n, one in zip(SIZES, own, strict=True))
        for own in zip(*moments, strict=True)
    )
    return clients, torch.linalg.solve(square, cross).flatten()


def fitted(
    method: str, per_round: int = 2, rounds: int = 300, **participation: Any
) -> torch.Tensor:
    """The weights that a run ends at, with steps that fade so that the noise of the sampling does."""
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(model.weight)
    own = {"name": method, "local_steps": 1, "lr": 0.05, "schedule": "cosine"}
    fedspan.fit(
        model, federation()[0], method=own, rounds=rounds, batch_size="full", clients_per_round=per_round,
        loss=nn.MSELoss(), seed=0, progress=False, participation=participation,
    )  # fmt: skip
    return model.weight.detach().flatten()


def test_the_unbiased_mean_leads_methods_without_controls_to_the_objective_of_the_weights() -> None:
    promised = federation()[1]

    def far(method: str, **participation: Any) -> float:
        return float((fitted(method, **participation) - promised).norm() / promised.norm())

    assert (
        far("fedavg") > 0.5
    )  # the mean of a round is divided by the weights of those who take part
    assert far("fedavg", unbiased=True) < 0.2
    assert far("fedavgm", unbiased=True) < 0.2
    assert far("scaffold") < 1e-3
    assert far("ssf", unbiased=True) < 1e-3  # which needs no help


@pytest.mark.parametrize("method", ["scaffold", "ssf", "ef21"])
def test_methods_with_controls_do_not_use_it(method: str) -> None:
    plain, unbiased = (fitted(method, rounds=5, unbiased=one) for one in (False, True))
    assert torch.equal(plain, unbiased)


@pytest.mark.parametrize("method", ["fedavg", "fedadam", "subavg"])
def test_with_everyone_the_unbiased_mean_is_the_mean(method: str) -> None:
    plain, unbiased = (fitted(method, len(SIZES), 20, unbiased=one) for one in (False, True))
    torch.testing.assert_close(plain, unbiased)


@pytest.mark.parametrize("method", ["fedavg", "subavg", "ssf"])
def test_secure_sums_are_weighted_alike(method: str) -> None:
    pytest.importorskip("cryptography")
    clients, _ = federation()
    own = {
        "method": {"name": method, "local_steps": 2, "lr": 0.05},
        "rounds": 6,
        "clients_per_round": 4,
        "seed": 1,
    }
    found = []
    for privacy in (None, {"secure": True, "secure_bits": 64}):
        model = nn.Linear(3, 1, bias=False)
        nn.init.zeros_(model.weight)
        fedspan.fit(
            model, clients, loss=nn.MSELoss(), batch_size="full", progress=False, privacy=privacy,
            participation={"unbiased": True}, **own,
        )  # fmt: skip
        found.append(model.weight.detach())
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-5)


def test_a_comparison_warns_of_methods_that_minimize_different_objectives() -> None:
    clients, _ = federation()

    def told(per_round: int, names: list[str], **participation: Any) -> bool:
        methods = [{"name": name, "lr": 0.01} for name in names]
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            fedspan.compare(
                methods, nn.Linear(3, 1, bias=False), clients, loss=nn.MSELoss(), rounds=2, seeds=1, progress=False,
                clients_per_round=per_round, participation=participation, test=clients[0],
            )  # fmt: skip
        return any(
            "fedavg: another objective than the other methods" in str(one.message) for one in found
        )

    assert told(2, ["fedavg", "scaffold"])
    assert not told(2, ["fedavg", "scaffold"], unbiased=True)
    assert not told(2, ["fedavg", "scaffold"], weights="uniform")
    assert not told(2, ["fedavg", "subavg"])
    assert not told(7, ["fedavg", "scaffold"])
