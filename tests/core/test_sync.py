"""Catch-up downloads: a client that was away gets what it missed, or the whole model when that is fewer bytes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from fedspan.core import registry, wire
from fedspan.core.errors import ProtocolError
from fedspan.core.sync import Log, ModelSync
from support.loops import WireTransport, advance, model, small, start
from support.methods import GAUSSIAN, build

D, M, ITEM, PROBE = 12, 2, 8, 8


def gaps(loop: Any) -> tuple[np.ndarray, np.ndarray]:
    """(rounds since each client of the coming cohort took part, whether it is new)."""
    rnd = loop._round()
    return rnd.t - rnd.last_round[0], rnd.last_round[0] < 0


@pytest.mark.parametrize("rank", [1, 3, 5, 12])
def test_ssf_sends_r_up_and_min_of_missed_and_whole_down(rank: int) -> None:
    method = build("ssf", correction="always", projector={"name": "gaussian", "rank": rank})
    problem = small()
    transport = WireTransport(method, problem)
    loop = start(method, problem, transport=transport)
    seen = set()
    for _ in range(60):
        gap, new = gaps(loop)
        advance(loop, 1)
        missed = np.where(new | (gap * rank > D), D, gap * rank)
        assert transport.down_bytes[-1] == ((missed + rank) * M * ITEM + PROBE).tolist()
        assert transport.up_bytes[-1] == [rank * M * ITEM] * 3
        seen |= {bool(whole) for whole in (gap * rank > D)[~new]}
    assert seen == ({False, True} if rank > 1 else {False})


@pytest.mark.parametrize(("name", "up", "down"), [("fedavg", 1, 1), ("scaffold", 1, 2)])
def test_full_methods_send_d(name: str, up: int, down: int) -> None:
    loop = advance(start(build(name), small()), 10)
    assert loop.ledger.up.sum() == 10 * 3 * up * D * M * ITEM
    assert loop.ledger.down.sum() == 10 * 3 * down * D * M * ITEM


@pytest.mark.parametrize(("name", "trained"), [("fedit", 3 * (D + M)), ("ffalora", 3 * M)])
def test_lora_sends_the_base_weights_once_and_then_the_adapters(name: str, trained: int) -> None:
    method, problem = build(name, rank=3), small()
    loop = start(method, problem, transport=WireTransport(method, problem))
    for _ in range(20):
        _, new = gaps(loop)
        advance(loop, 1)
        assert loop.transport.down_bytes[-1] == ((new * D * M + trained) * ITEM + PROBE).tolist()
        assert loop.transport.up_bytes[-1] == [trained * ITEM] * 3


def test_powersgd_sends_changes_as_two_factors_and_survives_empty_rounds() -> None:
    """6 × 12 numbers at r = 1: a change is 18 numbers, so up to four are sent instead of x; copies stay right."""
    n, method, problem = 6, build("powersgd", rank=1), small(outputs=6)
    loop = start(method, problem, transport=WireTransport(method, problem))
    sizes = set()
    for t in range(60):
        gap, new = gaps(loop)
        ids, x = loop._round().ids[0].tolist(), model(loop)
        loop.transport.lost = [0, 1, 2] if t in (0, 7, 20, 21, 33) else []
        advance(loop, 1)
        basis, reply = (n, D) if t % 2 else (D, n)
        missed = np.where(new | (gap > 4), D * n, gap * (D + n))
        assert loop.transport.down_bytes[-1] == ((missed + basis) * ITEM).tolist()
        assert loop.transport.up_bytes[-1] == ([] if loop.transport.lost else [reply * ITEM] * 3)
        for client in () if loop.transport.lost else ids:
            torch.testing.assert_close(loop.transport.replicas[client].x, x, rtol=1e-12, atol=1e-14)
        sizes |= set(missed.tolist())
    assert sizes == {18, 36, 54, 72}


def test_fedsub_always_sends_the_mean_of_a_clients_last_round() -> None:
    method = build("fedsub", projector={"name": "gaussian", "rank": 5}, refresh=2)
    problem = small()
    loop = start(method, problem, transport=WireTransport(method, problem))
    for _ in range(60):
        gap, new = gaps(loop)
        advance(loop, 1)
        whole = new | (gap * 5 > D + 5)
        missed = np.where(new, D, np.where(whole, D + 5, gap * 5))
        assert loop.transport.down_bytes[-1] == (missed * M * ITEM + PROBE).tolist()


@pytest.mark.parametrize("k", [2, 5, 12, 24])
def test_doublesqueeze_sends_the_codes_that_were_missed_or_the_model(k: int) -> None:
    method = build("doublesqueeze", compressor={"name": "topk", "k": k})
    problem = small()
    transport = WireTransport(method, problem)
    loop = start(method, problem, transport=transport)
    entry, whole = k * ITEM + math.ceil(k * 5 / 8), D * M * ITEM  # places among 24 take 5 bits
    past, seen = [], set()
    for _ in range(60):
        past.append(model(loop).clone())
        gap, new = gaps(loop)
        advance(loop, 1)
        more = gap * entry > whole
        assert transport.down_bytes[-1] == np.where(new | more, whole, gap * entry).tolist()
        assert transport.up_bytes[-1] == [entry] * 3
        seen |= {bool(each) for each in more[~new]}
    assert seen == {2: {False}, 5: {False, True}, 12: {False, True}, 24: {True}}[k]
    for replica in transport.replicas:
        assert torch.equal(replica.x, past[replica.last_round])  # to the bit, by way of the codes


def test_the_papers_control_rule_costs_twice_the_uplink() -> None:
    exact, paper = (
        advance(
            start(build("ssf", correction="always", projector=GAUSSIAN, control=rule), small()), 9
        )
        for rule in ("exact", "paper")
    )
    assert paper.ledger.up.sum() == 2 * exact.ledger.up.sum()


def test_the_log_holds_no_more_than_is_worth_sending() -> None:
    loop = advance(start(build("ssf", projector=GAUSSIAN), small()), 50)
    assert len(loop.server.log.entries) == D // 3
    assert loop.server.log.end == 50


def test_the_log_of_fedsub_does_not_wait_for_clients_that_never_came() -> None:
    """Line 5 needs the mean of the round in which a client last took part, and of none before its first."""
    loop = start(build("fedsub", projector=GAUSSIAN), small())
    for _ in range(60):
        advance(loop, 1)
        loop.last_round[:, -1] = -1  # as if no reply of this client had come
        others = loop.last_round[:, :-1]
        assert len(loop.server.log.entries) <= loop.t - others[others >= 0].min()
    assert len(loop.server.log.entries) < 30


def test_every_copy_of_the_model_is_the_servers_of_its_round() -> None:
    method, problem = build("ssf", projector=GAUSSIAN), small(torch.float32)
    transport = WireTransport(method, problem)
    loop = start(method, problem, transport=transport)
    past = []
    for _ in range(40):
        past.append(model(loop).clone())
        advance(loop, 1)
    for replica in transport.replicas:
        assert torch.equal(replica.x, past[replica.last_round])


def test_a_client_without_a_copy_refuses_changes() -> None:
    entry = torch.ones(1, 1, 2)
    sent = ModelSync(torch.ones(1, 1, 8), Log((entry,), 1), np.array([[0]])).pick(0)
    arrived = ModelSync.from_arrays(sent.arrays())
    with pytest.raises(ProtocolError, match="no copy"):
        arrived.open(None, 0, lambda e, t: e)
    with pytest.raises(ProtocolError, match="open"):
        _ = arrived.model


def test_the_log_says_when_it_has_forgotten() -> None:
    log = (
        Log((), 0)
        .push(torch.zeros(1, 1, 2), 2)
        .push(torch.ones(1, 1, 2), 2)
        .push(torch.ones(1, 1, 2) * 2, 2)
    )
    assert float(log.at(2)[0, 0, 0]) == 2
    for gone in (0, 3):
        with pytest.raises(ProtocolError, match="not in the log"):
            log.at(gone)


def test_what_a_client_keeps_besides_its_copy_of_the_model() -> None:
    x0, layout = small().x0, small().layout
    kept = {
        "fedavg": (build("fedavg"), 0),
        "scaffold": (build("scaffold"), D * M),
        "ssf": (build("ssf", projector=GAUSSIAN), D * M),
        "subavg": (build("subavg", projector=GAUSSIAN), 0),
        "fedsub": (build("fedsub", projector=GAUSSIAN), 3 * M),
        "stale": (build("fedsub", projector=GAUSSIAN, variant="stale"), 2 * 3 * M),
        "compressed": (build("compressed"), 0),
        "scafcom": (build("scafcom"), 2 * D * M),
        "scaffnew": (build("scaffnew"), D * M + 2),
        "tamuna": (build("tamuna"), D * M + 2),
        "fednova": (build("fednova"), 0),
        "fedsmu": (build("fedsmu"), D * M),
        "sparseloco": (build("sparseloco"), 3 * D * M + 1),
    }
    kept |= {
        name: (build(name), D * M)
        for name in (
            "ef",
            "ef21",
            "qsparse",
            "doublesqueeze",
            "scallion",
            "powersgd",
            "fedvarp",
            "feddyn",
        )
    }
    nothing = (
        "mimelite",
        "fedexp",
        "fedprox",
        "fedavgm",
        "fedadam",
        "fedyogi",
        "fedadagrad",
        "fedit",
        "ffalora",
    )
    kept |= {name: (build(name), 0) for name in nothing}
    assert {"stale", *registry.choices("method")} == set(kept)
    for method, numbers in kept.values():
        state = wire.pack(method.init_client(x0, layout))
        assert sum(array.numel() for array in state.values()) == numbers


def test_the_log_of_fedsub_does_not_grow_while_a_client_stays_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it needs of the rounds it missed is one change and x in full; numbers and bytes are as with all changes."""

    def run(*, checked: bool) -> Any:
        method, problem = build("fedsub", projector=GAUSSIAN), small()
        loop = start(method, problem, transport=WireTransport(method, problem))
        away = int(loop._round().ids[0, 0])
        for t in range(90):
            ids = loop._round().ids[0].tolist()
            loop.transport.lost = [ids.index(away)] if 0 < t < 70 and away in ids else []
            advance(loop, 1)
            log = loop.server.log
            assert not checked or len(log.entries) <= D // 3 + 1
            assert not checked or len(log.earlier) < problem.clients
            if t == 60:
                again = Log.from_arrays(log.arrays())
                assert again.earlier.keys() == log.earlier.keys()
                assert not checked or 0 in again.earlier
                assert all(torch.equal(again.at(t), log.at(t)) for t in (0, 60))
        assert int(loop.last_round[0, away]) >= 70
        return loop

    short = run(checked=True)
    monkeypatch.setattr(
        type(short.method), "_push", lambda _, log, entry, rnd: log.push(entry, rnd.missed_by_any)
    )
    whole = run(checked=False)
    assert len(whole.server.log.entries) >= len(short.server.log.entries)
    assert torch.equal(model(short), model(whole))
    assert short.transport.down_bytes == whole.transport.down_bytes


def test_a_new_client_that_has_the_start_is_sent_no_more_than_the_model() -> None:
    """One that comes back is sent an entry beside x by FedSub, so changes as large as both are worth sending to it."""
    log = Log(tuple(torch.zeros(1, 1, 3) for _ in range(4)), 4)
    sync = ModelSync(torch.zeros(1, 1, 10), log, np.array([[-1, 0]]), "first", known_start=True)
    assert sync.sizes().tolist() == [[40, 48]]
