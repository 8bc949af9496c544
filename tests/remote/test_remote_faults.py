"""Faults of remote clients: lost and spoilt replies, lost states, a server that stops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedspan.compressors.topk import TopK
from fedspan.core.encoded import Encoded, unpack, width_of
from fedspan.remote.messages import DroppedError, RoundMessage
from support.channel import Fault, LocalChannel, ids_of, remote
from support.loops import advance, close, model, simulated, small
from support.methods import build
from support.remote import SSF, controls


def after_saving(channel: LocalChannel) -> Fault:
    """The client works and writes, then its reply is lost on the way."""

    def fault(message: RoundMessage) -> list[Any]:
        channel.client(message.client).reply(message)
        return []

    return fault


FAULTS: dict[str, tuple[Callable[[LocalChannel], Fault], str]] = {
    "silent": (lambda _: lambda __: [], "no reply in time"),
    "reply lost": (after_saving, "no reply in time"),
    "raises": (
        lambda _: lambda m: [replace(m, status="failed", reason="ValueError: boom", arrays={})],
        "boom",
    ),
    "channel fails": (lambda _: lambda __: [DroppedError("node unavailable")], "node unavailable"),
    "nan": (lambda w: lambda m: [spoil(w, m, lambda a: a * float("nan"))], "not finite"),
    "shape": (lambda w: lambda m: [spoil(w, m, lambda a: a[..., :-1])], "expected"),
    "huge": (lambda w: lambda m: [spoil(w, m, lambda a: a.repeat(1, 1, 999))], "expected"),
    "dtype": (lambda w: lambda m: [spoil(w, m, lambda a: a.int())], "expected"),
    "names": (
        lambda w: lambda m: [replace(spoil(w, m, lambda a: a), arrays={"x": torch.zeros(1)})],
        "arrays",
    ),
    "other method": (
        lambda w: lambda m: [replace(spoil(w, m, lambda a: a), fingerprint="0" * 12)],
        "same spec",
    ),
    "late": (lambda w: lambda m: [replace(spoil(w, m, lambda a: a), t=m.t - 1)], "another message"),
    "refused": (
        lambda _: lambda m: [replace(m, status="refused", reason="no", arrays={})],
        "refused: no",
    ),
}


def spoil(
    channel: LocalChannel, message: RoundMessage, change: Callable[[torch.Tensor], torch.Tensor]
) -> RoundMessage:
    reply = channel.client(message.client).reply(message)
    return replace(reply, arrays={k: change(v) for k, v in reply.arrays.items()})


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_costs_one_reply_and_nothing_else(kind: str, tmp_path: Path) -> None:
    """The round goes on with the rest; the client's own file rolls back; the result is that of the accepted updates."""
    method, problem = build("ssf", **SSF), small()
    loop, channel, end = remote(method, problem, tmp_path)
    make, words = FAULTS[kind]
    missing = set()
    for t in (2, 3, 6):
        client = ids_of(loop, t)[1]
        missing.add((t, client))
        channel.faults[t, client] = make(channel)
    advance(loop, 12)
    close(model(loop), model(simulated(method, problem, 12, missing)))
    assert len(loop.events) == 3
    assert all(words in event and event.startswith("round ") for event in loop.events)
    close(controls(channel, end).mean(0), loop.server.c[0, 0])
    assert end.accepted.sum() == 12 * 3 - 3


def test_a_reply_that_the_servers_step_cannot_take_is_one_clients_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compressor of a plugin may trust the places in a reply; the server tries each reply before the round's step."""

    def trusting(
        self: TopK, encoded: Encoded, n: int, keys: Any, dtype: torch.dtype
    ) -> torch.Tensor:
        values, packed = encoded.take("values", "index")
        index = unpack(packed, width_of(n - 1), values.shape[-1]).long()
        return values.new_zeros(*values.shape[:-1], n).scatter_(-1, index, values)

    monkeypatch.setattr(TopK, "decompress", trusting)
    method, problem = build("ef", compressor={"name": "topk", "k": 0.3}), small()
    loop, channel, _ = remote(method, problem, tmp_path)
    client = ids_of(loop, 2)[1]
    channel.faults[2, client] = lambda m: [
        spoil(channel, m, lambda a: a if a.is_floating_point() else torch.full_like(a, 255))
    ]
    advance(loop, 5)
    close(model(loop), model(simulated(method, problem, 5, {(2, client)})))
    assert ["cannot be decoded" in event for event in loop.events] == [True]


def test_a_second_reply_counts_once(tmp_path: Path) -> None:
    method, problem = build("ssf", **SSF), small()
    loop, channel, _ = remote(method, problem, tmp_path)
    channel.faults[1, ids_of(loop, 1)[0]] = lambda m: [channel.client(m.client).reply(m)] * 2
    advance(loop, 6)
    close(model(loop), model(simulated(method, problem, 6)))
    assert "second reply was dropped" in loop.events[0]


@pytest.mark.parametrize(("name", "settings"), [("ssf", SSF), ("doublesqueeze", {})])
def test_too_few_replies_count_nothing(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    method, problem = build(name, **settings), small()
    loop, channel, end = remote(method, problem, tmp_path, min_replies=3)
    ids = ids_of(loop, 2)
    channel.faults[2, ids[0]] = lambda _: []
    advance(loop, 8)
    close(model(loop), model(simulated(method, problem, 8, {(2, c) for c in ids})))
    assert "fewer than 3" in loop.events[-1]
    assert end.accepted.sum() == 7 * 3


LOSSES: dict[str, Callable[[Path], Any]] = {
    "deleted": lambda path: path.unlink(),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-7]),
    "altered": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\x55"),
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_a_lost_state_is_restored_exactly(kind: str, tmp_path: Path) -> None:
    """The law of every method, for other ways of losing a state."""
    method, problem = build("ssf", **SSF), small()
    loop, channel, end = remote(method, problem, tmp_path)
    advance(loop, 7)
    for client in range(problem.clients):
        path = channel.client(client).state_file.path
        if path.exists():
            LOSSES[kind](path)
    advance(loop, 8)
    close(model(loop), model(simulated(method, problem, 15)), 1e-10)
    assert any("restored from the server's copy" in event for event in loop.events)
    assert end.accepted.sum() == 15 * 3
    nominal = simulated(method, problem, 15).ledger.down.sum()
    assert loop.ledger.down.sum() > nominal  # what was sent twice is counted twice


@pytest.mark.parametrize("name", ["ef", "doublesqueeze"])
def test_a_lost_reply_takes_error_feedback_back(name: str, tmp_path: Path) -> None:
    """The client has worked and written its new e_i; the reply never came: e_i is as if the round had not been."""
    method, problem = build(name), small()
    loop, channel, _ = remote(method, problem, tmp_path)
    missing = set()
    for t in (2, 3, 6):
        client = ids_of(loop, t)[1]
        missing.add((t, client))
        channel.faults[t, client] = after_saving(channel)
    advance(loop, 12)
    close(model(loop), model(simulated(method, problem, 12, missing)))


def test_without_a_copy_a_client_re_enters_empty(tmp_path: Path) -> None:
    method, problem = build("ssf", **SSF), small()
    loop, channel, end = remote(method, problem, tmp_path, backup=False)
    advance(loop, 7)
    before = controls(channel, end)
    client = ids_of(loop, 7)[0]
    assert end.accepted[client]
    channel.client(client).state_file.path.unlink()
    advance(loop, 1)
    assert any("re-enters with an empty state" in event for event in loop.events)
    gap = controls(channel, end).mean(0) - loop.server.c[0, 0]
    close(
        gap, -before[client] / problem.clients
    )  # what c no longer matches: the lost control's share, for good


def test_who_re_enters_empty_does_what_a_newcomer_would(tmp_path: Path) -> None:
    """FedSub's dual is owed a change since the last round of a client; one that starts anew is owed none."""
    method, problem = build("fedsub", projector={"name": "coordinate", "rank": 4}), small()
    loop, channel, end = remote(method, problem, tmp_path / "states", backup=False)
    advance(loop, 7)
    client = ids_of(loop, 7)[0]
    assert end.accepted[client]
    channel.client(client).state_file.path.unlink()
    advance(loop, 1)
    message, reply = channel.messages[-1]
    assert message.client == client
    assert reply is not None
    fresh = LocalChannel(method, problem, tmp_path / "fresh").client(client)
    plain = {
        name: array for name, array in message.arrays.items() if not name.startswith("restore.")
    }
    newcomer = fresh.reply(replace(message, accepted=0, arrays=plain))
    assert newcomer.status == "ok"
    close(reply.arrays["b"], newcomer.arrays["b"])


def test_a_server_that_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Clients are rounds ahead of the checkpoint: their files no longer have the version, the copies do."""
    method, problem = build("ssf", **SSF), small()
    loop, _, _ = remote(method, problem, tmp_path / "states", copies_dir=tmp_path / "server")
    advance(loop, 4)
    saved = {k: v.clone() for k, v in loop.save().items()}
    advance(loop, 5)
    again, channel, end = remote(
        method, problem, tmp_path / "states", copies_dir=tmp_path / "server", resume=True
    )
    again.load(saved)
    advance(again, 8)
    close(model(again), model(simulated(method, problem, 12)))
    close(controls(channel, end).mean(0), again.server.c[0, 0])
    assert any("restored" in event for event in again.events)


def test_many_random_faults(tmp_path: Path) -> None:
    """Forty faults of all kinds at random: c = mean c_i holds, and the model is that of the accepted updates."""
    rng = np.random.default_rng(0)
    method, problem = build("ssf", **SSF), small()
    loop, channel, end = remote(method, problem, tmp_path)
    missing, wiped = set(), 0
    for t in range(40):
        ids = ids_of(loop, t)
        client = ids[int(rng.integers(3))]
        kind = list(FAULTS)[int(rng.integers(len(FAULTS)))]
        if rng.random() < 0.3:
            path = channel.client(client).state_file.path
            wiped += path.exists()
            path.unlink(missing_ok=True)
        else:
            missing.add((t, client))
            channel.faults[t, client] = FAULTS[kind][0](channel)
        advance(loop, 1)
    assert wiped > 5
    assert len(missing) > 20
    close(model(loop), model(simulated(method, problem, 40, missing)), 1e-10)
    close(controls(channel, end).mean(0), loop.server.c[0, 0], 1e-10)
