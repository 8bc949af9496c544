"""Clients that hold the initial model are sent only what has changed since."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedspan import Participation
from fedspan.core.spec import Spec
from fedspan.costs.plan import price
from fedspan.methods import SSF, Scaffold
from fedspan.remote.flower.client import agreement_of
from fedspan.remote.messages import RoundMessage
from fedspan.tasks.regression import Regression
from support.channel import remote
from support.loops import advance, model, small, start
from support.methods import build, every_method

ROUNDS = 8


@pytest.mark.parametrize(("name", "settings"), every_method())
def test_both_ends_agree_and_count_the_same_bytes(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    method, problem = build(name, **settings), small(torch.float32)
    apart, _, _ = remote(method, problem, tmp_path, known_start=True)
    here = start(method, problem, known_start=True)
    plain = advance(start(method, problem), ROUNDS)
    advance(apart, ROUNDS), advance(here, ROUNDS)
    assert not apart.events
    assert torch.equal(model(apart), model(plain))
    np.testing.assert_array_equal(apart.ledger.down, here.ledger.down)
    if method.broadcast(plain.server, plain._round()).get("sync") is not None:
        assert here.ledger.down.sum() < plain.ledger.down.sum()
    else:
        assert here.ledger.down.sum() == plain.ledger.down.sum()


def test_a_new_client_is_sent_the_changes_of_all_rounds_or_the_model() -> None:
    problem = small(torch.float32)
    method = SSF(rank=2, lr=0.01, local_steps=2, drift="controls")
    loop = advance(start(method, problem, 1, known_start=True), 30)
    assert (loop.last_round >= 0).all()
    r, d = 2 * 2, problem.layout.size
    first, seen, before = [], set[int](), np.zeros(problem.clients, np.int64)
    again = start(method, problem, 1, known_start=True)
    for t in range(30):
        (client,) = again._round().ids[0].tolist()
        advance(again, 1)
        if client not in seen:
            first.append((t, int(again.ledger.down[0, client] - before[client])))
            seen.add(client)
        before = again.ledger.down[0].copy()
    probe = 8
    for t, sent in first:
        assert sent == min(r * 4 * t, d * 4) + r * 4 + probe


def test_a_plan_knows_what_new_clients_are_sent() -> None:
    spec = Spec(
        rounds=60,
        method=SSF(rank=2, lr=0.01),
        task=Regression(clients=30, dim=40, outputs=2, samples=12),
        batch_size=4,
        clients_per_round=2,
        participation=Participation(known_start=True),
    )
    problem = spec.task.build((0,), spec)
    loop = advance(start(spec.method, problem, 2, known_start=True), 60)
    assert price(spec).down == loop.ledger.down.sum()
    without = dataclasses.replace(spec, participation=Participation())
    assert price(spec).down < price(without).down


def test_an_initial_model_that_differs_is_refused() -> None:
    spec = Spec(
        rounds=2,
        method=SSF(rank=2, lr=0.01),
        task=Regression(),
        participation=Participation(known_start=True),
    )
    problem, other = spec.task.build((0,), spec), spec.task.build((0,), spec)
    other.x0 = other.x0 + 1e-6
    server, client = agreement_of(spec, problem), agreement_of(spec, other)
    message = RoundMessage("refused", 0, 0, 0, client.fingerprint, settings=client.text)
    assert "the initial model differs" in server.explain(message)
    seeded = agreement_of(
        dataclasses.replace(spec, seed=9), other
    )  # which explains why the model differs
    message = RoundMessage("refused", 0, 0, 0, seeded.fingerprint, settings=seeded.text)
    assert "seed is 9 on the client and 0 on the server" in server.explain(message)
    plain = dataclasses.replace(spec, method=Scaffold(lr=0.01))  # sends x in every round
    assert agreement_of(plain, problem) == agreement_of(plain, other)
    unknown = dataclasses.replace(spec, participation=Participation())
    assert agreement_of(unknown, problem) == agreement_of(unknown, spec.task.build((0,), spec))
