"""What SSF saves on the download: changes that were missed, compressed ones, and P c in few bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedspan.compressors import Sign
from fedspan.core.bundle import Bundle
from fedspan.core.errors import ProtocolError, SpecError
from fedspan.core.layout import Block, Layout
from fedspan.core.round import Round
from fedspan.downlinks import Coded
from fedspan.engine.simulator import Replica, opened
from fedspan.methods import SSF
from fedspan.projectors import Gaussian
from support.loops import advance, model, small, start
from support.methods import GAUSSIAN, build

QSGD = {"name": "qsgd", "levels": 127}


@pytest.mark.parametrize("name", ["ssf", "subavg"])
def test_momentum_is_that_of_what_was_sent(name: str) -> None:
    """P m is the compressed change after every round, as clients that keep m compute it."""
    method = build(name, projector=GAUSSIAN, down_compressor={"name": "sign"}, server_momentum=0.5)
    loop = start(method, small(), 7)
    for _ in range(5):
        advance(loop, 1)
        rnd = replace(loop._round(), t=loop.t - 1)
        P = method.subspace(rnd)
        torch.testing.assert_close(
            P @ loop.server.m, method.downlink.opened(loop.server.log.entries[-1], P, rnd)
        )


@pytest.mark.parametrize("down", [{"name": "qsgd", "levels": 7}, {"name": "sign"}])
def test_compressed_downloads_reach_the_optimum(down: dict[str, Any]) -> None:
    """Error feedback on the server, and controls that do not depend on what was left out."""
    method = build("ssf", projector=GAUSSIAN, lr=0.05, down_compressor=down)
    loop = advance(start(method, small(batch="full", samples=40), 7), 1200)
    assert float(loop.problem.evaluate(model(loop))["rel_err"][0]) < 1e-5
    clients = loop.transport.clients().c.mean(1, keepdim=True)
    torch.testing.assert_close(clients, loop.server.c, rtol=1e-9, atol=1e-11)


def test_what_is_left_out_is_sent_later() -> None:
    """Σ of all moves before compression = x0 − x + e, without momentum and with P = I."""
    method = build(
        "ssf", projector={"name": "identity"}, down_compressor={"name": "topk", "k": 0.2}
    )
    loop = start(method, small())
    total = torch.zeros_like(loop.server.x)
    for _ in range(8):
        server, rnd = loop.server, loop._round()
        down = method.broadcast(server, rnd)
        _, up = method.client_step(_cohort(loop, rnd), down, loop.problem.cohort(rnd), rnd)
        total += method.lr * method.local_steps * (server.c + rnd.mean(up.v))
        advance(loop, 1)
    torch.testing.assert_close(small().x0 - loop.server.x + loop.server.e, total)
    assert loop.server.e.norm() > 0


def _cohort(loop: Any, rnd: Any) -> Any:
    state = loop.transport.clients()
    return Bundle(**{name: value[:, rnd.ids[0]] for name, value in vars(state).items()})


def test_eight_bits_both_ways_and_two_for_the_control_cost_a_34th_of_fedavg() -> None:
    """ρ = 0.1, everybody in every round, after the first round, which brings x in full."""
    problem = small(clients=3, dim=4000, outputs=1, dtype=torch.float32)
    both = {"compressor": QSGD | {"unbiased": False}, "down_compressor": QSGD}
    costs = []
    for method in (
        build("ssf", projector={"name": "coordinate", "rank": 0.1}, **both),
        build("fedavg"),
    ):
        loop = advance(start(method, problem, 3), 1)
        before = int(loop.ledger.up.sum() + loop.ledger.down.sum())
        advance(loop, 2)
        costs.append(int(loop.ledger.up.sum() + loop.ledger.down.sum()) - before)
    assert costs[1] / 35 < costs[0] < costs[1] / 33


def test_settings_that_make_no_sense_are_named() -> None:
    biased = SSF(lr=0.1, space=Gaussian(rank=3), downlink=Coded(control=Sign()))
    with pytest.raises(SpecError, match=r"`downlink\.control` 'sign' is biased"):
        start(biased, small())
    with pytest.raises(SpecError, match="`downlink` 'randk' is not contractive"):
        start(
            build("ssf", projector=GAUSSIAN, down_compressor={"name": "randk", "k": 0.3}), small()
        )


@pytest.mark.parametrize("projector", ["coordinate", "gaussian"])
def test_missed_changes_lead_to_the_servers_bits(projector: str) -> None:
    """The first change makes a new vector, to which the others are added in place; the copy on disk stays."""
    method = SSF(space={"name": projector, "rank": 0.3}, lr=0.1)  # type: ignore[arg-type]
    layout = Layout((Block("w", (8, 20), 1), Block("b", (8,))), torch.float32)
    copy, ids = torch.randn(1, 1, layout.size), np.zeros((1, 1), np.int64)
    copy[..., ::7] = -0.0
    before = copy.numpy().tobytes()
    rounds = [Round(t, (0,), 1, layout, ids, np.full((1, 1), 0)) for t in range(5)]
    entries = [torch.randn(1, 1, method.subspace(rnd).rank) for rnd in rounds]
    server = copy
    for entry, rnd in zip(entries, rounds, strict=True):
        server = method.subspace(rnd).T.plus(entry, server, sign=-1)
    down = {
        "sync.missed": torch.cat(entries, 1),
        "probe": torch.zeros(1, 1, 1),
        "switch": torch.zeros(1, 1, 1),
    }
    found = opened(
        method, Replica(method.init_client(copy, layout), copy, 0), down, replace(rounds[-1], t=5)
    ).sync.model
    assert found.numpy().tobytes() == server.numpy().tobytes()
    assert copy.numpy().tobytes() == before


@pytest.mark.parametrize("count", [4, 6])
def test_a_log_that_is_too_short_or_too_long_is_refused(count: int) -> None:
    """It would lead to another model than the server's, without a word."""
    method = SSF(rank=0.3, lr=0.1)
    layout = Layout((Block("w", (8, 20), 1),), torch.float32)
    copy, rnd = (
        torch.zeros(1, 1, layout.size),
        Round(5, (0,), 1, layout, np.zeros((1, 1), np.int64), np.zeros((1, 1))),
    )
    missed = torch.zeros(1, count, method.subspace(rnd).rank)
    down = {"sync.missed": missed, "probe": torch.zeros(1, 1, 1), "switch": torch.zeros(1, 1, 1)}
    with pytest.raises(
        ProtocolError, match=f"the server sent {count} changes of the model, .* is round 5"
    ):
        opened(method, Replica(method.init_client(copy, layout), copy, 0), down, rnd)
