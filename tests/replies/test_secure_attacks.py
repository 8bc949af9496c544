"""A secure sum under attack: by a server that asks too much, and by clients that answer wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip(
    "cryptography", reason="cryptography is not installed; pip install 'fedspan[privacy]'"
)


from fedspan.core.errors import ProtocolError
from fedspan.core.privacy import Privacy
from fedspan.replies.fixed_point import FixedPoint
from fedspan.replies.secure import client as secure_client
from fedspan.replies.secure import shares as secure_shares
from fedspan.replies.secure.client import Member
from fedspan.replies.secure.keys import new_key
from support.secure import at, real, session, whole


def test_a_server_that_asks_both_questions_is_refused() -> None:
    """First for the seed of client 1, then for its key; whichever it asks first, the second is not answered."""
    sessions, messages, _ = at("unmask")
    asked = messages[0]
    other = asked | {"secure.survivors": torch.tensor([0, 2, 3, 4])}
    for first, second in ((asked, other), (other, asked), (asked, asked)):
        after, answer = secure_client.unmask(sessions[0], first)
        assert answer["shares"].shape == (5, 33)
        with pytest.raises(ProtocolError, match="'unmask' of the session has been answered"):
            secure_client.unmask(after, second)
        again = {"secure.session": asked["secure.session"]}
        with pytest.raises(ProtocolError, match="'shares' of the session has been answered"):
            secure_client.share(after, again, Member(0, Privacy(secure=True)))
        assert not after.private.numel()  # all secrets are gone
        assert not after.shares.numel()


def test_no_question_is_answered_twice_or_out_of_turn() -> None:
    sessions, messages, local = at("train")
    with pytest.raises(ProtocolError, match="comes too early"):
        secure_client.unmask(sessions[0], messages[0] | {"secure.survivors": torch.arange(5)})
    after, _ = secure_client.mask(sessions[0], messages[0], np.ones(4, np.uint32))
    with pytest.raises(
        ProtocolError, match="has been answered"
    ):  # another reply under the same mask would open both
        secure_client.mask(after, messages[0], np.zeros(4, np.uint32))
    sessions, messages, _ = at("shares")
    after, _ = secure_client.share(sessions[0], messages[0], Member(0, Privacy(secure=True)))
    with pytest.raises(ProtocolError, match="has been answered"):
        secure_client.share(after, messages[0], Member(0, Privacy(secure=True)))
    other = messages[0] | {"secure.session": torch.zeros(16, dtype=torch.uint8)}
    with pytest.raises(ProtocolError, match="another session"):
        secure_client.share(sessions[0], other, Member(0, local.privacy))


Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
HOSTILE: dict[str, tuple[str, Change, str]] = {
    "keys of this client changed": (
        "shares",
        lambda m: {"secure.keys": m["secure.keys"].roll(1, 0)},
        "were changed",
    ),
    "the same keys twice": (
        "shares",
        lambda m: {"secure.keys": m["secure.keys"][:1].repeat(5, 1)},
        "same keys",
    ),
    "a low threshold": (
        "shares",
        lambda _: {"secure.threshold": torch.tensor([2])},
        "threshold is 2 of 5",
    ),
    "a threshold nobody reaches": (
        "shares",
        lambda _: {"secure.threshold": torch.tensor([6])},
        "threshold is 6",
    ),
    "not among the clients": (
        "shares",
        lambda _: {"secure.clients": torch.arange(1, 6)},
        "not among",
    ),
    "clients twice": (
        "shares",
        lambda _: {"secure.clients": torch.tensor([0, 0, 1, 2, 3])},
        "each once",
    ),
    "negative clients": ("shares", lambda _: {"secure.clients": torch.arange(-1, 4)}, "each once"),
    "too few sharers": ("train", lambda m: few(m, 3), "fewer than the threshold of 4"),
    "unknown sharers": (
        "train",
        lambda _: {"secure.sharers": torch.tensor([0, 1, 2, 3, 9])},
        "not one of the session",
    ),
    "shares cut": (
        "train",
        lambda m: {"secure.shares": m["secure.shares"][:, :-1]},
        "expected \\(5, 94\\)",
    ),
    "shares as floats": (
        "train",
        lambda m: {"secure.shares": m["secure.shares"].float()},
        "no array",
    ),
    "too few survivors": (
        "unmask",
        lambda _: {"secure.survivors": torch.arange(3)},
        "fewer than the threshold",
    ),
    "survivors without oneself": (
        "unmask",
        lambda _: {"secure.survivors": torch.arange(1, 5)},
        "not one of the session",
    ),
    "survivors who sent no shares": (
        "unmask",
        lambda _: {"secure.survivors": torch.arange(6)},
        "not one of the session",
    ),
}


def few(message: dict[str, torch.Tensor], count: int) -> dict[str, torch.Tensor]:
    return {
        "secure.sharers": torch.arange(count),
        "secure.shares": message["secure.shares"][:count],
    }


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_question_is_refused(kind: str) -> None:
    phase, change, words = HOSTILE[kind]
    sessions, messages, local = at(phase)
    message = messages[0] | change(messages[0])
    local.sessions[0] = sessions[0]
    with pytest.raises(ProtocolError, match=words):
        local.ask(phase, {0: message}, {})


# What a single client may answer.


def spoilt(phase: str, client: int, change: Change, clients: int = 7) -> Any:
    """A session in which one client changes its answer to a question."""
    values = {i: np.full(4, float(i)) for i in range(clients)}
    one, local = session(values, Privacy(secure=True, secure_threshold=0.6))

    def ask(asked: str, messages: Any, looks: Any) -> Any:
        answers = local.ask(asked, messages, looks)
        return (
            answers | {client: answers[client] | change(answers[client])}
            if asked == phase
            else answers
        )

    one.ask = ask
    return one


def wrong_share(answer: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    shares = answer["shares"].clone()
    shares[2, 5] ^= 1
    return {"shares": shares}


@pytest.mark.parametrize("client", range(7))
def test_a_wrong_share_is_found_and_left_out(client: int) -> None:
    one = spoilt("unmask", client, wrong_share)
    survivors, total = one.run()
    assert survivors == list(range(7))
    assert real(total, one.fixed) == [21.0] * 4
    assert one.events == [(client, "1 of the shares that it sent were wrong")]


def test_without_a_share_to_spare_a_wrong_one_ends_the_round() -> None:
    one = spoilt("unmask", 3, wrong_share, clients=2 * 2)
    one.threshold = 4
    with pytest.raises(ProtocolError, match="mask of client 2 cannot be removed"):
        one.run()


def test_forged_shares_between_clients_count_as_missing() -> None:
    """A server that changes what it relays: the seal breaks, and the others' shares are enough."""
    one = spoilt("shares", 3, lambda a: {"shares": a["shares"].index_fill(0, torch.tensor([5]), 7)})
    _, total = one.run()
    assert real(total, one.fixed) == [21.0] * 4
    assert one.events == [(5, "1 of the shares that it sent were wrong")]


@pytest.mark.parametrize(
    ("phase", "change"),
    [
        ("train", lambda a: {"masked": a["masked"][:-1]}),
        ("train", lambda a: {"masked": a["masked"].long()}),
        ("train", lambda a: {"masked": a["masked"].float()}),
        ("train", lambda a: {"more": a["masked"]}),
        ("shares", lambda a: {"shares": a["shares"][:-1]}),
        ("keys", lambda a: {"keys": a["keys"][:-1]}),
        ("unmask", lambda a: {"shares": a["shares"][:, :-1]}),
    ],
)
def test_an_answer_of_another_shape_is_left_out(phase: str, change: Change) -> None:
    one = spoilt(phase, 3, change)
    survivors, total = one.run()
    there = phase == "unmask"
    assert (3 in survivors) == there
    assert real(total, one.fixed) == [21.0 if there else 18.0] * 4
    assert one.events == [(3, f"the answer to {phase!r} is not what was asked for")]


def test_keys_of_an_earlier_session_are_refused() -> None:
    kept: list[torch.Tensor] = []
    first = spoilt("keys", 3, lambda a: kept.append(a["keys"]) or {})
    first.run()
    second = spoilt("keys", 3, lambda _: {"keys": kept[0]})
    second.used = first.used
    survivors, _ = second.run()
    assert survivors == [0, 1, 2, 4, 5, 6]
    assert second.events == [(3, "its keys were used before")]


def test_a_key_on_which_everybody_agrees_is_refused() -> None:
    """A point of low order: each pair with it would have the mask of zero."""
    one = spoilt(
        "keys",
        3,
        lambda a: {
            "keys": torch.cat([a["keys"][:32], torch.zeros(32, dtype=torch.uint8), a["keys"][64:]])
        },
    )
    survivors, _ = one.run()
    assert 3 not in survivors
    assert one.events == [(3, "a public key is not usable")]


# What the server sees.


def everything_seen(
    values: dict[int, np.ndarray], privacy: Privacy, gone: Any = None
) -> tuple[list[Any], Any]:
    """All messages in both directions."""
    one, local = session(values, privacy, gone)
    seen: list[Any] = []

    def ask(phase: str, messages: Any, looks: Any) -> Any:
        answers = local.ask(phase, messages, looks)
        seen.append((phase, messages, answers))
        return answers

    one.ask = ask
    one.run()
    return seen, one


def test_masked_vectors_look_uniform() -> None:
    """Every byte of every masked vector, whatever was sent: 255 degrees of freedom, so χ² is 255 ± 23."""
    privacy = Privacy(secure=True)
    seen, one = everything_seen(
        {i: np.full(20_000, float(i)) for i in range(4)}, privacy, {"unmask": {2}}
    )
    masked = next(answers for phase, _, answers in seen if phase == "train")
    for client, answer in masked.items():
        raw = answer["masked"].numpy().view(np.uint8).reshape(-1, 4)
        for column in raw.T:
            counts = np.bincount(column, minlength=256)
            assert ((counts - len(column) / 256) ** 2 / (len(column) / 256)).sum() < 255 + 6 * 23
        own = whole(np.full(20_000, float(client)), one.fixed)
        assert not (answer["masked"].numpy().view(np.uint32) == own).mean() > 0.01


def test_nothing_the_server_receives_holds_a_secret_or_a_number() -> None:
    privacy = Privacy(secure=True)
    values = {i: np.random.default_rng(i).normal(size=64) for i in range(5)}
    one, local = session(values, privacy)
    secrets: list[bytes] = []
    seen: list[bytes] = []

    def ask(phase: str, messages: Any, looks: Any) -> Any:
        answers = local.ask(phase, messages, looks)
        seen.extend(a.numpy().tobytes() for answer in answers.values() for a in answer.values())
        if phase == "keys":
            secrets.extend(
                key.numpy().tobytes() for s in local.sessions.values() for key in s.private
            )
        return answers

    one.ask = ask
    one.run()
    fixed = FixedPoint.of(privacy)
    numbers = [whole(vector, fixed).tobytes() for vector in values.values()]
    floats = [
        vector.astype(kind).tobytes()
        for vector in values.values()
        for kind in (np.float32, np.float64)
    ]
    assert len(secrets) == 15
    log = b"|".join(seen)
    assert not any(secret in log for secret in secrets)
    assert not any(
        part[start : start + 8] in log
        for part in numbers + floats
        for start in range(0, len(part), 8)
    )


def test_t_minus_one_colluding_clients_and_the_server_open_nothing() -> None:
    """They hold t − 1 shares of the seed of client 0; every seed is possible, and what they get is another one."""
    sessions, messages, _ = at("unmask", clients=6)
    t = sessions[0].threshold
    assert t == 4
    shares = {}
    for colluder in range(1, t):
        _, answer = secure_client.unmask(sessions[colluder], messages[colluder])
        shares[colluder + 1] = answer["shares"][0].numpy().tobytes()
    seed = sessions[0].private[2].numpy().tobytes()
    assert secure_shares.combine(shares) != seed
    _, answer = secure_client.unmask(sessions[5], messages[5])
    assert secure_shares.combine(shares | {6: answer["shares"][0].numpy().tobytes()}) == seed
    # for any other seed there is one more share that makes it the secret
    other, point = new_key(), 77
    weights = secure_shares._lagrange(0, (*shares, point))
    rest = sum(w * int.from_bytes(s, "big") for w, s in zip(weights, shares.values(), strict=False))
    share = (
        (int.from_bytes(other, "big") - rest)
        * pow(weights[-1], -1, secure_shares.PRIME)
        % secure_shares.PRIME
    )
    assert secure_shares.combine(shares | {point: share.to_bytes(33, "big")}) == other


# The parts.
