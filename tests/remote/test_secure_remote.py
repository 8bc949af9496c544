"""Secure sums across machines: the simulator's result, faults at every question, and a server that reads nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip(
    "cryptography", reason="cryptography is not installed; pip install 'fedspan[privacy]'"
)


from fedspan.core.privacy import Privacy
from fedspan.engine.loop import Loop
from fedspan.engine.simulator import Simulator
from fedspan.remote.messages import DroppedError, RoundMessage
from fedspan.replies.secure.client import PHASES
from support.channel import LocalChannel, remote
from support.loops import Scripted, advance, close, model, small, start
from support.methods import build
from support.remote import FINE, SSF, controls, ids_of, no_sync, secure, uneven  # noqa: F401 - a fixture


def plain(
    method: Any, problem: Any, rounds: int, missing: set[tuple[int, int]] | None = None
) -> Loop:
    """The same run without secure sums, in one process."""
    return advance(
        start(method, problem, 4, Scripted(Simulator(method, problem), missing or set())), rounds
    )


@pytest.mark.parametrize(
    ("name", "settings", "weighted"),
    [
        ("ssf", SSF, True),
        ("ssf", SSF | {"momentum": 0.5, "refresh": 3, "moments": "project"}, False),
        ("subavg", SSF, True),
        ("fedavg", {}, False),
        ("scaffold", {}, True),
        (
            "fedsub",
            {"projector": {"name": "identity"}},
            False,
        ),  # its log holds what it adds
    ],
)
def test_the_result_is_that_of_the_plain_run(
    name: str, settings: Any, weighted: bool, tmp_path: Path
) -> None:
    method, problem = build(name, **settings), small()
    if weighted:
        uneven(problem)
    loop, channel, end = secure(method, problem, tmp_path)
    advance(loop, 4)
    assert not loop.events
    close(model(loop), model(plain(method, problem, 4)), 1e-7)
    assert [m.status for m, _ in channel.messages[:16]] == [
        phase for phase in PHASES for _ in range(4)
    ]
    if name in ("ssf", "scaffold"):
        shares = (
            torch.full((7, 1), 1 / 7)
            if problem.weights is None
            else torch.from_numpy(problem.weights)[:, None]
        )
        close(
            (shares * controls(channel, end)).sum(0),
            loop.server.c[0, 0],
            1e-12 if weighted else 1e-7,
        )


FAULTS: dict[str, Any] = {
    "silent": (lambda _: lambda __: [], "no answer to {!r} in time"),
    "answer lost": (
        lambda c: lambda m: [c.client(m.client).reply(m)][:0],
        "no answer to {!r} in time",
    ),
    "node gone": (lambda _: lambda __: [DroppedError("node unavailable")], "node unavailable"),
    "wrong size": (lambda c: lambda m: [cut(c.client(m.client).reply(m))], "expected"),
    "other arrays": (
        lambda c: lambda m: [replace(c.client(m.client).reply(m), arrays={"a": torch.zeros(3)})],
        "has arrays",
    ),
    "raises": (lambda _: lambda m: [replace(m, status="failed", reason="boom", arrays={})], "boom"),
    "lies about a loss": (
        lambda _: lambda m: [replace(m, status="lost", reason="gone", arrays={})],
        "state lost: gone",
    ),
}


def cut(reply: RoundMessage) -> RoundMessage:
    return replace(reply, arrays={name: array[:-1] for name, array in reply.arrays.items()})


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_at_any_question_costs_at_most_one_reply(kind: str, tmp_path: Path) -> None:
    """One question per round. A client gone before its numbers arrived rolls back; gone after that, it counts."""
    method, problem = build("ssf", **SSF), small()
    loop, channel, end = secure(method, problem, tmp_path)
    make, words = FAULTS[kind]
    spoilt = [(t, ids_of(loop, t)[1], phase) for t, phase in enumerate(PHASES, 1)]
    if kind == "lies about a loss":
        del spoilt[2]  # a client that lost its state is asked again
    for t, client, phase in spoilt:
        channel.faults[(t, client) if phase == "train" else (t, client, phase)] = make(channel)
    advance(loop, 6)
    missing = {(t, client) for t, client, phase in spoilt if phase != "unmask"}
    close(model(loop), model(plain(method, problem, 6, missing)), 1e-7)
    close(controls(channel, end).mean(0), loop.server.c[0, 0], 1e-12)
    assert len(loop.events) == len(spoilt)
    for event, (t, client, phase) in zip(loop.events, spoilt, strict=True):
        assert event.startswith(f"round {t}: client {client}: ")
        assert words.format(phase) in event


@pytest.mark.parametrize("phase", PHASES)
def test_below_the_threshold_nothing_changes_anywhere(phase: str, tmp_path: Path) -> None:
    """Two of four are gone: the server's model stays, and every client's state rolls back."""
    method, problem = build("ssf", **SSF), small()
    loop, channel, end = secure(method, problem, tmp_path)
    ids = ids_of(loop, 1)
    for client in ids[:2]:
        channel.faults[(1, client) if phase == "train" else (1, client, phase)] = lambda _: []
    advance(loop, 1)
    accepted, before = end.accepted.copy(), model(loop).clone()
    advance(loop, 1)
    assert loop.events[-1].endswith(
        f"2 of 4 clients answered {phase!r}, fewer than the threshold of 3; nothing counted"
    )
    assert torch.equal(model(loop), before)
    assert (end.accepted == accepted).all()
    advance(loop, 2)
    close(model(loop), model(plain(method, problem, 4, {(1, c) for c in ids})), 1e-7)
    close(controls(channel, end).mean(0), loop.server.c[0, 0], 1e-12)


def test_a_round_is_tried_again_with_new_keys(tmp_path: Path) -> None:
    method, problem = build("ssf", **SSF), small()
    loop, channel, _ = secure(method, problem, tmp_path, pause=5.0)
    for client in ids_of(loop, 1)[:2]:
        channel.faults[1, client] = lambda _: []
    advance(loop, 4)
    close(model(loop), model(plain(method, problem, 4)), 1e-7)
    keys = [
        tuple(reply.arrays["keys"].tolist())
        for m, reply in channel.messages
        if m.status == "keys" and reply
    ]
    assert len(set(keys)) == len(keys) == 4 * 5


# What the server sees.


@pytest.mark.parametrize("masks", [True, False])
def test_the_server_receives_nothing_that_it_could_read(
    masks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything it received in every phase, against what each client sends in the plain run.

    Without masks the same search finds a number of every reply, up to rounding that differs in later rounds.
    """
    if not masks:
        for place in ("client", "server"):
            monkeypatch.setattr(f"fedspan.replies.secure.{place}.add_mask", lambda *_: None)
    method, problem = build("ssf", **SSF), small()
    loop, channel, _ = secure(
        method, problem, tmp_path / "a", secure=Privacy(secure=True, secure_range=64.0)
    )
    open_loop, open_channel, _ = remote(method, problem, tmp_path / "b")
    open_loop.clients_per_round = 4
    advance(loop, 3)
    advance(open_loop, 3)
    received = [reply for _, reply in channel.messages if reply is not None]
    assert {name for reply in received for name in reply.arrays} == {"keys", "shares", "masked"}
    close(model(loop), model(open_loop), 1e-4)
    log = b"|".join(
        array.numpy().tobytes() for reply in received for array in reply.arrays.values()
    )
    headers = " ".join(str(reply.header()) for reply in received)
    replies = [
        reply.arrays["v"].reshape(-1) for _, reply in open_channel.messages if reply is not None
    ]
    readable = 0
    for a in replies:
        whole = np.rint(a.numpy() * 2.0**20).astype(np.int32)
        readable += any(whole[i : i + 2].tobytes() in log for i in range(len(whole) - 1))
        assert not any(f"{value:.6g}" in headers for value in a.tolist())
    assert len(replies) == 12
    assert readable == (0 if masks else 12)


def test_masked_replies_look_uniform(tmp_path: Path) -> None:
    method, problem = build("fedavg"), small(dim=500)
    loop, channel, _ = secure(method, problem, tmp_path, secure=Privacy(secure=True))
    advance(loop, 4)
    masked = [
        r.arrays["masked"].numpy().view(np.uint8)
        for m, r in channel.messages
        if m.status == "train" and r
    ]
    counts = np.bincount(np.concatenate(masked), minlength=256)
    expected = counts.sum() / 256
    assert counts.sum() == 16 * 4 * 1001
    assert ((counts - expected) ** 2 / expected).sum() < 255 + 6 * 23


# A server that does more than it should.


def asked(tmp_path: Path, phase: str) -> tuple[LocalChannel, RoundMessage]:
    """A channel and a message of this question, which its client has not answered."""
    loop, channel, _ = secure(build("ssf", **SSF), small(), tmp_path)
    client, kept = ids_of(loop, 1)[1], []

    def keep(message: RoundMessage) -> list[Any]:
        kept.append(message)
        return []

    channel.faults[(1, client) if phase == "train" else (1, client, phase)] = keep
    advance(loop, 2)
    return channel, kept[0]


@pytest.mark.parametrize("phase", PHASES[1:])
def test_no_question_is_answered_twice(phase: str, tmp_path: Path) -> None:
    """Not even the same one, by a new process of the client that only has the files."""
    channel, message = asked(tmp_path, phase)
    assert channel.client(message.client).reply(message).status == "ok"
    again = channel.client(message.client).reply(message)
    assert again.status == "refused"
    assert "has been answered" in again.reason
    assert not again.arrays


def test_a_client_is_not_asked_for_both_shares(tmp_path: Path) -> None:
    channel, message = asked(tmp_path, "unmask")
    names = message.arrays["secure.survivors"].tolist()
    other = next(client for client in names if client != message.client)
    without = torch.tensor([client for client in names if client != other])
    first = channel.client(message.client).reply(
        replace(message, arrays=message.arrays | {"secure.survivors": without})
    )
    assert first.status == "ok"
    assert channel.client(message.client).reply(message).status == "refused"
    kept = channel.client(message.client).session()
    assert not kept.private.numel()


def test_a_client_with_secure_settings_never_replies_in_the_open(tmp_path: Path) -> None:
    """Neither without a session nor with the arrays of one left out; and a plain client answers no such question."""
    channel, message = asked(tmp_path, "train")
    bare = {name: array for name, array in message.arrays.items() if not name.startswith("secure.")}
    for arrays in (bare, bare | {"secure.session": torch.zeros(16, dtype=torch.uint8)}):
        reply = channel.client(message.client).reply(replace(message, arrays=arrays))
        assert reply.status == "refused"
        assert not reply.arrays
    fresh = LocalChannel(channel.method, channel.problem, tmp_path / "fresh")
    fresh.kind = channel.kind
    assert "no session" in fresh.client(message.client).reply(replace(message, accepted=0)).reason
    plain_channel = LocalChannel(channel.method, channel.problem, tmp_path / "plain")
    assert (
        "settings exclude"
        in plain_channel.client(message.client).reply(replace(message, status="keys")).reason
    )


def test_a_restarted_session_forgets_the_one_before(tmp_path: Path) -> None:
    channel, message = asked(tmp_path, "unmask")
    begun = replace(
        message, status="keys", arrays={"secure.session": torch.ones(16, dtype=torch.uint8)}
    )
    assert channel.client(message.client).reply(begun).status == "ok"
    assert "another session" in channel.client(message.client).reply(message).reason


def test_keys_of_an_earlier_round_are_refused(tmp_path: Path) -> None:
    loop, channel, _ = secure(build("ssf", **SSF), small(), tmp_path)
    advance(loop, 1)
    old = next(r for m, r in channel.messages if m.status == "keys" and r is not None)
    t = next(t for t in range(1, 9) if old.client in ids_of(loop, t))
    channel.faults[t, old.client, "keys"] = lambda m: [
        replace(channel.client(m.client).reply(m), arrays=old.arrays)
    ]
    advance(loop, t)
    assert loop.events == [f"round {t}: client {old.client}: its keys were used before"]


# Kills and losses.


class KilledError(BaseException):
    """The server's process ends."""


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("answered", [0, 3])
def test_a_server_killed_in_the_middle_of_a_round_is_resumed(
    phase: str, answered: int, tmp_path: Path
) -> None:
    """At any question, with any number of answers: the clients roll back and the run ends as if nothing had been."""
    method, problem = build("ssf", **SSF), small()
    loop, channel, _ = secure(method, problem, tmp_path)
    advance(loop, 2)
    saved = {name: array.clone() for name, array in loop.save().items()}
    deliver = channel.deliver

    def killed(messages: list[RoundMessage]) -> Iterator[Any]:
        for count, reply in enumerate(deliver(messages)):
            if messages[0].status == phase and count == answered:
                raise KilledError
            yield reply
        if messages[0].status == phase:
            raise KilledError

    channel.deliver = killed  # type: ignore[method-assign]
    with pytest.raises(KilledError):
        advance(loop, 1)
    again, channel, end = secure(method, problem, tmp_path)
    again.load(saved)
    advance(again, 2)
    assert not again.events
    close(model(again), model(plain(method, problem, 4)), 1e-7)
    close(controls(channel, end).mean(0), again.server.c[0, 0], 1e-12)


def test_a_client_that_lost_its_state_re_enters_with_an_empty_one(tmp_path: Path) -> None:
    """There is no copy to restore it from; the event says so, and its masked reply still counts."""
    method, problem = build("ssf", **SSF), small()
    loop, channel, _ = secure(method, problem, tmp_path)
    advance(loop, 4)
    client = next(c for c in ids_of(loop, 4) if c in ids_of(loop, 3))
    channel.client(client).state_file.path.unlink()
    advance(loop, 1)
    assert len(loop.events) == 2
    assert "state lost" in loop.events[0]
    assert "re-enters with an empty state" in loop.events[1]
    assert (loop.last_round[0, ids_of(loop, 4)] == 4).all()
