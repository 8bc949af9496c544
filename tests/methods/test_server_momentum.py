"""Momentum and extrapolation on the server against plain formulas and against FedAvgM."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedspan.core.bundle import Bundle
from support.loops import advance, model, small, start
from support.methods import GAUSSIAN, build

BETA = 0.6


@pytest.mark.parametrize("name", ["subavg", "ssf"])
def test_momentum_moves_only_inside_the_subspace(name: str) -> None:
    """m and x follow their definition, from the rounds of the run itself."""
    method = build(name, projector=GAUSSIAN, server_momentum=BETA, server_lr=0.7)
    plain = build(name, projector=GAUSSIAN, server_lr=0.7)
    loop = advance(start(method, small()), 5)
    for _ in range(4):
        rnd, server = loop._round(), loop.server
        P = method.subspace(rnd)
        advance(loop, 1)
        up_to_now = loop.server.log.entries[-1] / 0.7
        delta = up_to_now - BETA * (P @ server.m)  # what the round adds by itself
        expected = server.m + P.T @ (BETA * (P @ server.m) + delta - P @ server.m)
        torch.testing.assert_close(loop.server.m, expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(P @ loop.server.m, up_to_now, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(
            model(loop), server.x - 0.7 * (P.T @ up_to_now), rtol=1e-10, atol=1e-12
        )
        outside = loop.server.m - server.m
        assert (outside - P.T @ (P @ outside)).norm() < 1e-12
    first, other = (advance(start(one, small()), 1) for one in (method, plain))
    assert torch.equal(model(first), model(other))  # m starts at zero


@pytest.mark.parametrize(("name", "settings"), [("subavg", {}), ("ssf", {"correction": "never"})])
def test_at_full_rank_it_is_fedavgm(name: str, settings: dict[str, Any]) -> None:
    """With P = I, no correction and everybody in every round."""
    ours = build(
        name, projector={"name": "identity"}, server_momentum=BETA, server_lr=0.7, **settings
    )
    theirs = build("fedavgm", server_momentum=BETA, server_lr=0.7)
    found, wanted = (model(advance(start(one, small(), 7), 12)) for one in (ours, theirs))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "settings",
    [
        {"server_momentum": BETA},
        {"extrapolate": True},
        {"server_momentum": BETA, "correction": "tested"},
        {"server_momentum": BETA, "correction": "never"},
    ],
)
def test_at_full_rank_ssf_is_scaffold_with_the_same_server(settings: dict[str, Any]) -> None:
    both = {"server_lr": 0.7, "correction": "always", **settings}
    ssf, scaffold = build("ssf", projector={"name": "identity"}, **both), build("scaffold", **both)
    found, wanted = (model(advance(start(one, small(), 3), 30)) for one in (ssf, scaffold))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def test_ffalora_moves_its_adapters_with_momentum() -> None:
    loop = advance(start(build("ffalora", rank=3, server_momentum=BETA), small()), 6)
    before = loop.server
    advance(loop, 1)
    torch.testing.assert_close(before.u - loop.server.u, loop.server.m, rtol=1e-10, atol=1e-13)
    assert (loop.server.m - BETA * before.m).norm() > 0


@pytest.mark.parametrize("name", ["subavg", "ssf"])
def test_extrapolation_is_the_step_of_fedexp(name: str) -> None:
    method, plain = (
        build(name, projector=GAUSSIAN, **more) for more in ({"extrapolate": True}, {})
    )
    loop, other = (advance(start(one, small(), 7), 1) for one in (method, plain))
    rnd = start(plain, small(), 7)._round()
    P, x0 = plain.subspace(rnd), small().x0
    f = small().cohort(rnd)
    down = plain.broadcast(plain.init_server(x0, rnd.layout), rnd)
    client = plain.init_client(x0.expand(-1, 7, -1), rnd.layout)
    _, up = plain.client_step(client, down, f, rnd)
    changes = up.v
    factor = float((changes**2).sum(-1).mean() / (2 * (changes.mean(1) ** 2).sum()))
    stretched, straight = (P @ (model(one) - x0) for one in (loop, other))
    torch.testing.assert_close(stretched, max(1.0, factor) * straight, rtol=1e-9, atol=1e-12)


def test_clients_that_disagree_make_a_longer_step() -> None:
    method = build("subavg", extrapolate=True)
    rnd = start(method, small(), 2)._round()

    def stretch(changes: torch.Tensor) -> float:
        along = torch.ones(1, 1, 2, dtype=torch.float64)
        arguments: Any = Bundle(), along, method.subspace(rnd), rnd, changes
        return float(method.server.step(*arguments)[0].mean())

    apart = torch.tensor([[[1.0, 0.1], [-1.0, 0.1]]], dtype=torch.float64)
    assert stretch(apart) == pytest.approx(1.01 / (2 * 0.01))
    assert stretch(torch.ones(1, 2, 2)) == 1.0
    assert stretch(torch.zeros(1, 2, 2)) == 1.0
