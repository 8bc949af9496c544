"""A server that tells clients different things to read one reply out of a secure sum: it gets nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip(
    "cryptography", reason="cryptography is not installed; pip install 'fedspan[privacy]'"
)

from fedspan.engine.loop import Loop
from fedspan.remote.messages import RoundMessage
from fedspan.remote.server import RemoteTransport
from support.channel import LocalChannel, remote
from support.loops import advance, close, model, small
from support.methods import build
from support.remote import FINE, ids_of, no_sync, secure, uneven  # noqa: F401

Change = Callable[
    [RoundMessage, int], RoundMessage
]  # (an honest message, the victim) → what is sent
COUNT = slice(96, 104)  # bytes of a client's number of examples in what it announces


def lying(channel: LocalChannel, change: Change, victim: int) -> None:
    """Changes every message of the server."""
    honest = channel.deliver

    def deliver(messages: list[RoundMessage]) -> Iterator[Any]:
        yield from honest([change(message, victim) for message in messages])

    channel.deliver = deliver  # type: ignore[method-assign]


def attacked(
    tmp_path: Path, change: Change, weighted: bool = False
) -> tuple[Loop, torch.Tensor | None, torch.Tensor]:
    """(the run after one round, the sum that the server got if any, what the victim would have sent in the open)."""
    method, problem = build("fedavg"), small()
    if weighted:
        uneven(problem)
    loop, channel, end = secure(method, problem, tmp_path / "secure")
    victim = ids_of(loop, 0)[1]
    lying(channel, change, victim)
    counted, exchange = [], end.exchange
    end.exchange = lambda *given: counted.append(exchange(*given)) or counted[-1]  # type: ignore[method-assign, func-returns-value]
    advance(loop, 1)
    open_loop, open_channel, _ = remote(method, problem, tmp_path / "open")
    open_loop.clients_per_round = 4
    advance(open_loop, 1)
    (own,) = (r.arrays for m, r in open_channel.messages if m.client == victim and r is not None)
    (name,) = own
    total = None if counted[0].up is None else 4 * getattr(counted[0].up, name).flatten()
    return loop, total, own[name].flatten()


def weights(message: RoundMessage, victim: int) -> RoundMessage:
    """1 for the victim, 1e-15 for all others."""
    weight = torch.tensor([1.0 if message.client == victim else 1e-15], dtype=torch.float64)
    given = {"secure.weight": weight} if message.status == "train" else {}
    return replace(message, arrays=message.arrays | given)


def numbers_of_examples(message: RoundMessage, victim: int) -> RoundMessage:
    """To all others the victim has 10^12 examples, so that they count for nothing; to the victim its own number."""
    return message if message.client == victim else inflated(message, victim)


def own_number(message: RoundMessage, victim: int) -> RoundMessage:
    """To the victim it has 10^12 examples itself."""
    return inflated(message, victim) if message.client == victim else message


def inflated(message: RoundMessage, victim: int) -> RoundMessage:
    if message.status != "shares":
        return message
    keys = message.arrays["secure.keys"].clone()
    row = message.arrays["secure.clients"].tolist().index(victim)
    keys[row, COUNT] = torch.frombuffer(
        bytearray((10**12).to_bytes(8, "little")), dtype=torch.uint8
    )
    return replace(message, arrays=message.arrays | {"secure.keys": keys})


def rosters(message: RoundMessage, victim: int) -> RoundMessage:
    """The victim is told of three clients, the others of all four."""
    if message.status != "shares" or message.client != victim:
        return message
    clients = message.arrays["secure.clients"]
    kept = clients != clients[clients != victim][0]
    cut = {"secure.clients": clients[kept], "secure.keys": message.arrays["secure.keys"][kept]}
    return replace(message, arrays=message.arrays | cut)


def thresholds(message: RoundMessage, victim: int) -> RoundMessage:
    """To the victim all four clients must stay, to the others three."""
    given = (
        {"secure.threshold": torch.tensor([4])}
        if message.status == "shares" and message.client == victim
        else {}
    )
    return replace(message, arrays=message.arrays | given)


def rounds(message: RoundMessage, victim: int) -> RoundMessage:
    """The victim is in another round than the others, in which other numbers are drawn."""
    return replace(message, t=message.t + (message.client == victim))


def late_round(message: RoundMessage, victim: int) -> RoundMessage:
    """The round changes for the victim in the middle of a session."""
    return rounds(message, victim) if message.status == "train" else message


def two_clients(message: RoundMessage, victim: int) -> RoundMessage:
    """The victim and one more."""
    if message.status != "shares":
        return message
    clients = message.arrays["secure.clients"]
    other = next(one for one in clients.tolist() if one not in (victim, message.client))
    kept = (clients == message.client) | (
        clients == (victim if message.client != victim else other)
    )
    cut = {"secure.clients": clients[kept], "secure.keys": message.arrays["secure.keys"][kept]}
    return replace(message, arrays=message.arrays | cut | {"secure.threshold": torch.tensor([2])})


ATTACKS: dict[str, tuple[Change, bool, str]] = {
    "weights": (weights, False, "the question 'train' has no array 'secure.weight'"),
    "weights, by examples": (weights, True, "the question 'train' has no array 'secure.weight'"),
    "examples where all count alike": (
        numbers_of_examples,
        False,
        "by 1000000000000 examples, but all clients count",
    ),
    "examples of others": (numbers_of_examples, True, "cannot be removed"),
    "other rosters": (
        rosters,
        False,
        "array 'shares' is ((3, 94), torch.uint8), expected ((4, 94)",
    ),
    "two clients": (
        two_clients,
        False,
        "2 clients take part, and a sum of fewer than 3 hides nobody",
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_server_cannot_read_one_reply(attack: str, tmp_path: Path) -> None:
    change, weighted, words = ATTACKS[attack]
    loop, total, own = attacked(tmp_path, change, weighted)
    if total is not None:  # whoever was told something else is not in it
        assert float((total - own).norm() / own.norm()) > 0.1
    assert any(words in event for event in loop.events), loop.events


@pytest.mark.parametrize("change", [thresholds, rounds, late_round, own_number])
def test_a_client_that_is_told_something_else_is_not_in_a_sum(
    change: Change, tmp_path: Path
) -> None:
    loop, total, own = attacked(tmp_path, change, weighted=True)
    assert loop.events
    assert total is None or float((total - own).norm() / own.norm()) > 0.1


def test_the_honest_sum_is_counted(tmp_path: Path) -> None:
    """The same check with nothing changed, so that the attacks above fail for their own sake."""
    for weighted in (False, True):
        loop, total, own = attacked(tmp_path / str(weighted), lambda message, _: message, weighted)
        assert not loop.events
        assert total is not None
        assert float((total - own).norm() / own.norm()) > 0.1


def begun(tmp_path: Path) -> tuple[Loop, LocalChannel, RemoteTransport, dict[str, torch.Tensor]]:
    """A run after its second round, and its checkpoint before that."""
    loop, channel, end = secure(build("fedavg"), small(), tmp_path)
    advance(loop, 1)
    saved = {name: array.clone() for name, array in loop.save().items()}
    advance(loop, 1)
    return loop, channel, end, saved


@pytest.mark.parametrize("phase", ["keys", "shares", "train"])
def test_a_round_is_not_summed_again_without_one_client(phase: str, tmp_path: Path) -> None:
    """The replies are the same, so that the difference of the sums would be that client's reply."""
    loop, channel, _, saved = begun(tmp_path)
    after = model(loop).clone()
    loop.load(saved)
    before, client = model(loop).clone(), ids_of(loop, 1)[2]
    channel.faults[(1, client) if phase == "train" else (1, client, phase)] = lambda _: []
    advance(loop, 1)
    assert torch.equal(model(loop), before)
    assert any(
        "round 1 was summed before, without or with 1 other clients" in event
        for event in loop.events
    )
    loop.load(
        saved
    )  # with the same clients it may be: a server that was killed before its checkpoint
    loop.events.clear()
    advance(loop, 1)
    assert not loop.events
    close(model(loop), after)


def test_a_round_that_failed_at_its_end_is_over(
    tmp_path: Path,
) -> None:
    """Trying it again would be refused for ever where a client is gone for good."""
    loop, channel, _ = secure(build("fedavg"), small(), tmp_path, pause=5.0)
    for client in ids_of(loop, 1)[:2]:
        channel.faults[1, client, "unmask"] = lambda _: []
    advance(loop, 3)
    assert loop.t == 3
    assert loop.events[-1].endswith(
        "2 of 4 clients answered 'unmask', fewer than the threshold of 3; nothing counted"
    )


def test_an_earlier_round_is_refused(tmp_path: Path) -> None:
    loop, channel, _, _ = begun(tmp_path)
    first = next(
        m for m, _ in channel.messages if m.status == "keys" and m.client in ids_of(loop, 1)
    )
    reply = channel.client(first.client).reply(first)
    assert reply.status == "refused"
    assert reply.reason.startswith("round 0 is over: this client has taken part in round 1")


def test_a_client_that_announces_other_examples_than_it_has_is_left_out(tmp_path: Path) -> None:
    """Weights are no way to count for more: the server knows the shares, and the others' sum is as without it."""
    method, problem = build("fedavg"), small()
    uneven(problem)
    loop, channel, _ = secure(method, problem, tmp_path)
    client = ids_of(loop, 0)[1]

    def boast(message: RoundMessage) -> list[Any]:
        reply = channel.client(client).reply(message)
        keys = reply.arrays["keys"].clone()
        keys[COUNT] = torch.tensor([0, 0, 1, 0, 0, 0, 0, 0], dtype=torch.uint8)
        return [replace(reply, arrays={"keys": keys})]

    channel.faults[0, client, "keys"] = boast
    advance(loop, 1)
    assert loop.events == [
        f"round 0: client {client}: it would count by 65536 examples, which is not what the server knows"
    ]
    assert (loop.last_round[0, ids_of(loop, 0)] == 0).sum() == 3
