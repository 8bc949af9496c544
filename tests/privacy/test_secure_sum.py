"""Secure sums as pure code: exact, whoever drops out, and closed to whoever asks twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cryptography", reason="cryptography is not installed; pip install 'fedspan[privacy]'")

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from fedspan.core import wire
from fedspan.core.errors import ProtocolError, SpecError
from fedspan.core.privacy import Privacy
from fedspan.privacy import secure_client, secure_shares
from fedspan.privacy.secure_client import PHASES
from fedspan.privacy.secure_identity import Identity
from fedspan.privacy.secure_keys import agreed_key, new_key, public_key, seal, unseal
from fedspan.privacy.secure_local import LocalClients
from fedspan.privacy.secure_masks import CHUNK, add_mask
from fedspan.privacy.secure_numbers import FixedPoint, Payload
from fedspan.privacy.secure_sum import SecureSum, TooFewError


def encoded(values: dict[int, np.ndarray], fixed: FixedPoint) -> dict[int, np.ndarray]:
    return {client: fixed.encode(vector)[0] for client, vector in values.items()}


def plain_sum(values: dict[int, np.ndarray], privacy: Privacy) -> list[int]:
    """Σ round(v · scale), in Python's whole numbers."""
    rows = [[round(float(v) * privacy.fixed_scale) for v in vector] for vector in values.values()]
    return [sum(column) for column in zip(*rows, strict=True)]


def vectors(clients: int, length: int, privacy: Privacy, seed: int) -> dict[int, np.ndarray]:
    """Random numbers, some of them at the ends of the range."""
    rng, most = np.random.default_rng(seed), privacy.fixed_range
    ids = sorted(rng.choice(10 * clients, clients, replace=False).tolist())
    edges = np.array([most, -most, 0.0, most - 1 / privacy.fixed_scale])
    return {i: np.where(rng.random(length) < 0.5, rng.choice(edges, length), rng.normal(size=length)) for i in ids}


def session(values: dict[int, np.ndarray], privacy: Privacy, gone: dict[str, Any] | None = None) -> Any:
    """(the sum, its clients)"""
    fixed = FixedPoint.of(privacy)
    clients = LocalClients(
        privacy, lambda there: encoded({i: values[i] for i in there}, fixed), lambda phase: (gone or {}).get(phase, ())
    )
    return SecureSum(sorted(values), len(next(iter(values.values()))), privacy, clients.ask), clients


@settings(max_examples=60, deadline=None)
@given(
    clients=st.integers(2, 9),
    length=st.integers(1, 40),
    bits=st.sampled_from([32, 64]),
    seed=st.integers(0, 2**32),
    dropped=st.lists(st.tuples(st.sampled_from(PHASES), st.integers(0, 8)), max_size=5),
)
def test_the_sum_is_that_of_the_rounded_numbers(
    clients: int, length: int, bits: Any, seed: int, dropped: list[tuple[str, int]]
) -> None:
    """Bit for bit, whoever is gone at whatever question, or else nothing at all."""
    privacy = Privacy(secure=True, secure_bits=bits)
    values = vectors(clients, length, privacy, seed)
    gone: dict[str, set[int]] = {}
    for phase, place in dropped:
        gone.setdefault(phase, set()).add(sorted(values)[place % clients])
    one, _ = session(values, privacy, gone)
    left = set(values)
    for phase in PHASES:
        left -= gone.get(phase, set())
        if len(left) < one.threshold:
            with pytest.raises(TooFewError, match=f"answered {phase!r}, fewer than the threshold"):
                one.run()
            return
    survivors, total = one.run()
    assert survivors == sorted(set(values) - set().union(*(gone.get(p, set()) for p in PHASES[:3])))
    assert one.fixed.signed(total).tolist() == plain_sum({i: values[i] for i in survivors}, privacy)
    assert not one.events


@pytest.mark.parametrize("bits", [32, 64])
def test_overflow_is_refused(bits: Any) -> None:
    """One client more than n · range · scale < 2^(bits − 1) allows; at the bound all ends of the range still add up."""
    privacy = Privacy(secure=True, secure_bits=bits, secure_range=2.0, secure_scale=2.0 ** (27 if bits == 32 else 45))
    most = int(2 ** (bits - 1) / (privacy.fixed_scale * 2.0)) - 1
    FixedPoint.of(privacy).check(most)
    with pytest.raises(SpecError, match=f"overflow {bits} bits"):
        FixedPoint.of(privacy).check(most + 1)
    if bits == 32:
        assert most == 7
        for value in (2.0, -2.0):
            one, _ = session({i: np.full(3, value) for i in range(most)}, privacy)
            assert one.fixed.decode(one.run()[1]).tolist() == [value * most] * 3
        with pytest.raises(SpecError, match="secure_scale"):
            session({i: np.ones(3) for i in range(most + 1)}, privacy)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"secure_threshold": 0.5}, "above 0.5"),
        ({"secure_bits": 16}, "32 or 64"),
        ({"secure_scale": 2.0**49, "secure_range": 16.0}, "2\\^53"),
        ({"secure_range": -1.0}, "positive"),
        ({"secure": 1}, "True or False"),
    ],
)
def test_settings_are_checked(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        Privacy(**({"secure": True} | wrong))


def test_values_outside_the_range_are_clipped_and_counted() -> None:
    """The count is itself part of the sum; the reply as it counts has the clipped values."""
    fixed = FixedPoint.of(Privacy(secure=True))
    payload = Payload.of(fixed, {"a": torch.zeros(1, 1, 3), "b": torch.zeros(1, 1, 1, dtype=torch.float64)})
    whole, counted = payload.encode({"a": torch.tensor([[[9.0, -1e30, 0.3]]]), "b": torch.tensor([[[1.0]]])})
    assert counted["a"].tolist() == [[[8.0, -8.0, pytest.approx(0.3, abs=2**-21)]]]
    arrays, clipped = payload.decode(whole + whole, 2.0)
    assert clipped == 4
    assert all(torch.equal(arrays[name], counted[name]) for name in counted)
    with pytest.raises(ProtocolError, match="not finite"):
        payload.encode({"a": torch.full((1, 1, 3), float("nan")), "b": torch.ones(1, 1, 1)})
    with pytest.raises(SpecError, match="real numbers"):
        Payload.of(fixed, {"a": torch.zeros(3, dtype=torch.int64)})


def test_weights_are_applied_by_the_clients() -> None:
    fixed = FixedPoint.of(Privacy(secure=True, secure_bits=64))
    payload = Payload.of(fixed, {"a": torch.zeros(1, 1, 4, dtype=torch.float64)})
    values, weights = torch.randn(3, 1, 1, 4, dtype=torch.float64), [0.5, 1.0, 1.7]
    rows = [payload.encode({"a": v}, w) for v, w in zip(values, weights, strict=True)]
    mean, _ = payload.decode(rows[0][0] + rows[1][0] + rows[2][0], sum(weights))
    counted = sum(w * row["a"] for w, (_, row) in zip(weights, rows, strict=True)) / sum(weights)
    torch.testing.assert_close(mean["a"], counted, rtol=0, atol=1e-15)
    torch.testing.assert_close(
        counted, sum(w * v for w, v in zip(weights, values, strict=True)) / 3.2, rtol=0, atol=1e-10
    )


# What a single client may be asked.


def at(phase: str, privacy: Privacy | None = None, clients: int = 5) -> tuple[dict[int, Any], dict[int, Any], Any]:
    """(sessions before a question, the messages with it, the clients), of an honest session."""
    privacy = privacy or Privacy(secure=True)
    one, local = session({i: np.ones(4) for i in range(clients)}, privacy)
    kept: list[Any] = []

    def ask(asked: str, messages: Any, looks: Any) -> Any:
        if asked == phase:
            kept.extend([dict(local.sessions), messages])
        return local.ask(asked, messages, looks)

    one.ask = ask
    one.run()
    return kept[0], kept[1], local


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
        assert not after.private.numel()  # all secrets are gone
        assert not after.shares.numel()


def test_no_question_is_answered_twice_or_out_of_turn() -> None:
    sessions, messages, local = at("train")
    with pytest.raises(ProtocolError, match="comes too early"):
        secure_client.unmask(sessions[0], messages[0] | {"secure.survivors": torch.arange(5)})
    after, _ = secure_client.mask(sessions[0], messages[0], np.ones(4, np.uint32))
    with pytest.raises(ProtocolError, match="has been answered"):  # another reply under the same mask would open both
        secure_client.mask(after, messages[0], np.zeros(4, np.uint32))
    sessions, messages, _ = at("shares")
    after, _ = secure_client.share(sessions[0], messages[0], Privacy(secure=True), None)
    with pytest.raises(ProtocolError, match="has been answered"):
        secure_client.share(after, messages[0], Privacy(secure=True), None)
    with pytest.raises(ProtocolError, match="another session"):
        secure_client.share(
            sessions[0], messages[0] | {"secure.session": torch.zeros(16, dtype=torch.uint8)}, local.privacy, None
        )


Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
HOSTILE: dict[str, tuple[str, Change, str]] = {
    "keys of this client changed": ("shares", lambda m: {"secure.keys": m["secure.keys"].roll(1, 0)}, "were changed"),
    "the same keys twice": ("shares", lambda m: {"secure.keys": m["secure.keys"][:1].repeat(5, 1)}, "same keys"),
    "a low threshold": ("shares", lambda _: {"secure.threshold": torch.tensor([2])}, "threshold is 2 of 5"),
    "a threshold nobody reaches": ("shares", lambda _: {"secure.threshold": torch.tensor([6])}, "threshold is 6"),
    "not among the clients": ("shares", lambda _: {"secure.clients": torch.arange(1, 6)}, "not among"),
    "clients twice": ("shares", lambda _: {"secure.clients": torch.tensor([0, 0, 1, 2, 3])}, "each once"),
    "negative clients": ("shares", lambda _: {"secure.clients": torch.arange(-1, 4)}, "each once"),
    "too few sharers": ("train", lambda m: few(m, 3), "fewer than the threshold of 4"),
    "unknown sharers": ("train", lambda _: {"secure.sharers": torch.tensor([0, 1, 2, 3, 9])}, "not one of this"),
    "shares cut": ("train", lambda m: {"secure.shares": m["secure.shares"][:, :-1]}, "expected \\(5, 94\\)"),
    "shares as floats": ("train", lambda m: {"secure.shares": m["secure.shares"].float()}, "no array"),
    "too few survivors": ("unmask", lambda _: {"secure.survivors": torch.arange(3)}, "fewer than the threshold"),
    "survivors without oneself": ("unmask", lambda _: {"secure.survivors": torch.arange(1, 5)}, "not one of this"),
    "survivors who sent no shares": ("unmask", lambda _: {"secure.survivors": torch.arange(6)}, "not one of this"),
}


def few(message: dict[str, torch.Tensor], count: int) -> dict[str, torch.Tensor]:
    return {"secure.sharers": torch.arange(count), "secure.shares": message["secure.shares"][:count]}


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
        return answers | {client: answers[client] | change(answers[client])} if asked == phase else answers

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
    assert one.fixed.decode(total).tolist() == [21.0] * 4
    assert one.events == [(client, "1 of the shares that it sent were wrong")]


def test_without_a_share_to_spare_a_wrong_one_ends_the_round() -> None:
    one = spoilt("unmask", 3, wrong_share, clients=2 * 2)
    one.threshold = 4
    with pytest.raises(TooFewError, match="mask of client 2 cannot be removed"):
        one.run()


def test_forged_shares_between_clients_count_as_missing() -> None:
    """A server that changes what it relays: the seal breaks, and the others' shares are enough."""
    one = spoilt("shares", 3, lambda a: {"shares": a["shares"].index_fill(0, torch.tensor([5]), 7)})
    _, total = one.run()
    assert one.fixed.decode(total).tolist() == [21.0] * 4
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
    assert one.fixed.decode(total).tolist() == [21.0 if there else 18.0] * 4
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
        "keys", 3, lambda a: {"keys": torch.cat([a["keys"][:32], torch.zeros(32, dtype=torch.uint8), a["keys"][64:]])}
    )
    survivors, _ = one.run()
    assert 3 not in survivors
    assert one.events == [(3, "a public key is not usable")]


# What the server sees.


def everything_seen(values: dict[int, np.ndarray], privacy: Privacy, gone: Any = None) -> tuple[list[Any], Any]:
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
    seen, one = everything_seen({i: np.full(20_000, float(i)) for i in range(3)}, privacy, {"unmask": {2}})
    masked = next(answers for phase, _, answers in seen if phase == "train")
    for client, answer in masked.items():
        raw = answer["masked"].numpy().view(np.uint8).reshape(-1, 4)
        for column in raw.T:
            counts = np.bincount(column, minlength=256)
            assert ((counts - len(column) / 256) ** 2 / (len(column) / 256)).sum() < 255 + 6 * 23
        own = one.fixed.encode(np.full(20_000, float(client)))[0]
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
            secrets.extend(key.numpy().tobytes() for s in local.sessions.values() for key in s.private)
        return answers

    one.ask = ask
    one.run()
    fixed = FixedPoint.of(privacy)
    numbers = [fixed.encode(vector)[0].tobytes() for vector in values.values()]
    floats = [vector.astype(kind).tobytes() for vector in values.values() for kind in (np.float32, np.float64)]
    assert len(secrets) == 15
    log = b"|".join(seen)
    assert not any(secret in log for secret in secrets)
    assert not any(part[start : start + 8] in log for part in numbers + floats for start in range(0, len(part), 8))


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
    share = (int.from_bytes(other, "big") - rest) * pow(weights[-1], -1, secure_shares.PRIME) % secure_shares.PRIME
    assert secure_shares.combine(shares | {point: share.to_bytes(33, "big")}) == other


# The parts.


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 12), data=st.data())
def test_any_t_shares_give_the_secret(count: int, data: st.DataObject) -> None:
    t = data.draw(st.integers(1, count))
    secret = data.draw(st.binary(min_size=32, max_size=32))
    points = data.draw(st.lists(st.integers(1, 10**9), min_size=count, max_size=count, unique=True))
    shares = dict(zip(points, secure_shares.split(secret, t, points), strict=True))
    chosen = data.draw(st.lists(st.sampled_from(points), min_size=t, max_size=t, unique=True))
    assert secure_shares.combine({point: shares[point] for point in chosen}) == secret


def test_the_field_is_a_field() -> None:
    p = secure_shares.PRIME
    assert all(pow(base, p - 1, p) == 1 for base in (2, 3, 5, 7, 11, 13))
    assert p < 256**secure_shares.SHARE < 2**264 + 1


def test_two_clients_agree_and_others_do_not() -> None:
    a, b, c = new_key(), new_key(), new_key()
    same = agreed_key(a, public_key(b), "mask", b"s", 1, 2), agreed_key(b, public_key(a), "mask", b"s", 1, 2)
    assert same[0] == same[1]
    others = {
        agreed_key(c, public_key(b), "mask", b"s", 1, 2),
        agreed_key(a, public_key(b), "shares", b"s", 1, 2),
        agreed_key(a, public_key(b), "mask", b"t", 1, 2),
        agreed_key(a, public_key(b), "mask", b"s", 1, 3),
    }
    assert len(others) == 4
    assert same[0] not in others
    sealed = seal(a, b"text")
    assert unseal(a, sealed) == b"text"
    assert unseal(b, sealed) is None
    assert unseal(a, sealed[:-1] + bytes([sealed[-1] ^ 1])) is None


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_a_mask_is_the_same_in_one_piece_or_many(dtype: Any) -> None:
    size = CHUNK // np.dtype(dtype).itemsize * 2 + 5
    seed = bytes(range(32))
    long, short = np.zeros(size, dtype), np.zeros(7, dtype)
    add_mask(long, seed)
    add_mask(short, seed)
    assert long[:7].tolist() == short.tolist()
    assert len(np.unique(long)) > size * 0.99
    add_mask(long, seed, -1)
    assert not long.any()


def test_a_session_survives_storage() -> None:
    sessions, messages, _ = at("unmask")
    stored: Any = wire.unpack(secure_client.Session, {k: v.clone() for k, v in wire.pack(sessions[1]).items()})
    first, second = (secure_client.unmask(one, messages[1])[1]["shares"] for one in (sessions[1], stored))
    assert torch.equal(first, second)
    assert replace(stored, answered=4).answered == 4


# Signed keys.

SIGNED = Privacy(secure=True, secure_signed=True)


def test_signed_keys_give_the_same_sum() -> None:
    one, _ = session({i: np.full(4, float(i)) for i in range(5)}, SIGNED, {"train": {2}})
    survivors, total = one.run()
    assert survivors == [0, 1, 3, 4]
    assert one.fixed.decode(total).tolist() == [8.0] * 4


@pytest.mark.parametrize("who", ["a stranger", "another client", "nobody"])
def test_a_server_cannot_pose_as_a_client(who: str) -> None:
    """It replaces the keys of client 1 by its own, signed with whatever key it has; every client refuses."""
    sessions, messages, local = at("shares", SIGNED)
    forger = {"a stranger": Identity.group([1])[1], "another client": local.identities[3], "nobody": None}[who]
    begun, answer = secure_client.advertise(messages[0], 1, Privacy(secure=True), None)
    row = answer["keys"].numpy().tobytes()
    row += bytes(64) if forger is None else forger.sign(row, begun.id.numpy().tobytes(), 1)
    keys = messages[0]["secure.keys"].clone()
    keys[1] = secure_client.to_tensor(row)
    local.sessions[0] = sessions[0]
    with pytest.raises(ProtocolError, match="keys of client 1 are not signed with its key in the roster"):
        local.ask("shares", {0: messages[0] | {"secure.keys": keys}}, {})


def test_signed_keys_of_an_earlier_session_with_the_same_name_are_of_no_use() -> None:
    """The server repeats a session's name and client 1's signed keys of it; nobody can seal shares with them."""
    _, messages, local = at("shares", SIGNED)
    asked, old = messages[0], messages[0]["secure.keys"]
    fresh = {c: local._answer("keys", c, asked, {})["keys"] for c in range(5)}
    keys = torch.stack([old[1] if c == 1 else fresh[c] for c in range(5)])
    sealed = {c: local._answer("shares", c, asked | {"secure.keys": keys}, {})["shares"] for c in (0, 2, 3, 4)}
    forged = torch.zeros(94, dtype=torch.uint8)
    to_0 = torch.stack([sealed[c][0] if c in sealed else forged for c in range(5)])
    relayed = {"secure.session": asked["secure.session"], "secure.sharers": torch.arange(5), "secure.shares": to_0}
    with pytest.raises(ProtocolError, match="did not seal its shares"):
        secure_client.mask(local.sessions[0], relayed, np.ones(4, np.uint32))


def test_a_client_without_an_identity_or_outside_the_roster(tmp_path: Path) -> None:
    message = {"secure.session": torch.zeros(16, dtype=torch.uint8)}
    with pytest.raises(ProtocolError, match="needs identity-key and roster"):
        secure_client.advertise(message, 0, SIGNED, None)
    with pytest.raises(ProtocolError, match="client 7 is not in this client's roster"):
        Identity.group([1])[1].check(b"", b"", b"", 7)


def test_an_identity_is_read_from_openssh_files(tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    (tmp_path / "key").write_bytes(private)
    (tmp_path / "roster").write_text(f"# the wards\n3 {public} ward-3\n\n4 {public}\n")
    one = Identity.read(tmp_path / "key", tmp_path / "roster")
    one.check(b"keys", one.sign(b"keys", b"s", 3), b"s", 3)
    with pytest.raises(ProtocolError, match="not signed"):
        one.check(b"keys", one.sign(b"keys", b"s", 4), b"s", 3)
    for text in ("x ssh-ed25519 AAAA", f"3 {public}\n3 {public}", f"{public}", "3 ssh-rsa AAAA"):
        (tmp_path / "bad").write_text(text)
        with pytest.raises(SpecError, match="has the line"):
            Identity.read(tmp_path / "key", tmp_path / "bad")
    with pytest.raises(SpecError, match="cannot be read"):
        Identity.read(tmp_path / "none", tmp_path / "roster")
    with pytest.raises(SpecError, match="ssh-keygen -t ed25519"):
        Identity.read(tmp_path / "roster", tmp_path / "roster")
