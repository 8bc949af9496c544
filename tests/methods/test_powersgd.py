"""PowerSGD: at full rank it is FedAvg, what it does not send it keeps, and its sides in turn are a power iteration."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedspan import Bundle
from fedspan.core.layout import Block, Layout
from support.equivalence import ROUNDS, relative
from support.loops import advance, model, small, start
from support.methods import build


@pytest.mark.parametrize("rank", [2, 1.0, 5])
def test_powersgd_of_full_rank_is_fedavg_in_model_and_bytes(rank: int | float) -> None:
    problem = small()
    full = advance(start(build("powersgd", rank=rank, server_lr=0.8), problem), ROUNDS)
    fedavg = advance(start(build("fedavg", server_lr=0.8), problem), ROUNDS)
    assert relative(model(full), model(fedavg)) < 1e-12
    assert full.ledger.totals() == fedavg.ledger.totals()


@pytest.mark.parametrize("rank", [1, 3])
def test_powersgd_sends_or_keeps_every_change(rank: int) -> None:
    """With everybody there, x + η_g mean e moves as FedAvg would from x."""
    problem = small(outputs=5)
    loop = start(build("powersgd", rank=rank, server_lr=0.8), problem, 7)
    fedavg = start(build("fedavg", server_lr=0.8), problem, 7)

    def with_errors() -> torch.Tensor:
        return model(loop) + 0.8 * loop.transport.clients().e.mean(1, keepdim=True)

    for _ in range(ROUNDS):
        x, before = model(loop), with_errors()
        fedavg.server = fedavg.server.replace(x=x)  # the same round from the same model
        moved = model(advance(fedavg, 1)) - x
        advance(loop, 1)
        assert relative(with_errors(), before + moved) < 1e-12
    assert loop.transport.clients().e.norm() > 0.1


def test_the_sides_of_powersgd_in_turn_are_a_power_iteration() -> None:
    """On a matrix that stays, what is sent becomes its best approximation of rank r."""
    layout = Layout((Block("w", (6, 4, 3), 1), Block("b", (6,))), torch.float64)
    method = build("powersgd", rank=2)
    rounds = [replace(start(method, small())._round(), t=t, layout=layout) for t in range(60)]
    M = torch.randn(1, 1, 78, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    basis = method.basis(Bundle(), rounds[0])
    for rnd in rounds:
        P = method.subspace(basis, rnd)
        assert relative(P @ (P.T @ (P @ M)), P @ M) < 1e-12
        basis = method.turned(P, P @ M)
    u, s, v = torch.linalg.svd(M[0, 0, :72].view(6, 12), full_matrices=False)
    best = (u[:, :2] * s[:2]) @ v[:2]
    assert relative((P.T @ (P @ M))[0, 0, :72].view(6, 12), best) < 1e-6
    assert torch.equal((P.T @ (P @ M))[0, 0, 72:], M[0, 0, 72:])
