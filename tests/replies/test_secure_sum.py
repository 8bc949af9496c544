"""Secure sums as pure code: exact, whoever drops out, and closed to whoever asks twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip(
    "cryptography", reason="cryptography is not installed; pip install 'fedspan[privacy]'"
)


from fedspan.core.errors import ProtocolError, SpecError
from fedspan.core.privacy import Privacy
from fedspan.replies.fixed_point import FixedPoint
from fedspan.replies.secure.client import PHASES
from fedspan.replies.secure.server import bytes_of_round
from support.secure import real, session, signed


def plain_sum(values: dict[int, np.ndarray], privacy: Privacy) -> list[int]:
    """Σ round(v · scale), in Python's whole numbers."""
    rows = [[round(float(v) * privacy.fixed_scale) for v in vector] for vector in values.values()]
    return [sum(column) for column in zip(*rows, strict=True)]


def vectors(clients: int, length: int, privacy: Privacy, seed: int) -> dict[int, np.ndarray]:
    """Random numbers, some of them at the ends of the range."""
    rng, most = np.random.default_rng(seed), privacy.fixed_range
    ids = sorted(rng.choice(10 * clients, clients, replace=False).tolist())
    edges = np.array([most, -most, 0.0, most - 1 / privacy.fixed_scale])
    return {
        i: np.where(rng.random(length) < 0.5, rng.choice(edges, length), rng.normal(size=length))
        for i in ids
    }


@settings(max_examples=60, deadline=None)
@given(
    clients=st.integers(3, 9),
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
            with pytest.raises(
                ProtocolError, match=f"answered {phase!r}, fewer than the threshold"
            ):
                one.run()
            return
    survivors, total = one.run()
    assert survivors == sorted(set(values) - set().union(*(gone.get(p, set()) for p in PHASES[:3])))
    assert signed(total).tolist() == plain_sum({i: values[i] for i in survivors}, privacy)
    assert not one.events


@pytest.mark.parametrize("bits", [32, 64])
def test_overflow_is_refused(bits: Any) -> None:
    """One client more than n · range · scale < 2^(bits − 1) allows; at the bound all ends of the range still add up."""
    privacy = Privacy(
        secure=True,
        secure_bits=bits,
        secure_range=2.0,
        secure_scale=2.0 ** (27 if bits == 32 else 45),
    )
    most = int(2 ** (bits - 1) / (privacy.fixed_scale * 2.0)) - 1
    FixedPoint.of(privacy).check(most)
    with pytest.raises(SpecError, match=f"overflow {bits} bits"):
        FixedPoint.of(privacy).check(most + 1)
    if bits == 32:
        assert most == 7
        for value in (2.0, -2.0):
            one, _ = session({i: np.full(3, value) for i in range(most)}, privacy)
            assert real(one.run()[1], one.fixed) == [value * most] * 3
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


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("bits", [32, 64])
def test_the_bytes_of_a_round_are_those_that_the_simulator_counts(bits: Any, signed: bool) -> None:
    privacy = Privacy(secure=True, secure_bits=bits, secure_signed=signed)
    one, clients = session(vectors(5, 17, privacy, 0), privacy)
    one.run()
    down, up = bytes_of_round(5, 17, privacy)
    assert set(clients.sent.values()) == {down}
    assert set(clients.received.values()) == {up}


def test_values_outside_the_range_are_clipped_and_counted() -> None:
    """The count is itself part of the sum; the reply as it counts has the clipped values."""
    fixed = FixedPoint.of(Privacy(secure=True))
    reply = {
        "a": torch.tensor([[[9.0, -1e30, 0.3]]]),
        "b": torch.ones(1, 1, 1, dtype=torch.float64),
    }
    whole, counted, clipped = fixed.encode(reply)
    assert counted["a"].tolist() == [[[8.0, -8.0, pytest.approx(0.3, abs=2**-21)]]]
    numbers = fixed.join(whole, clipped)
    totals, clipped = fixed.split(numbers + numbers, reply)
    assert clipped == 4
    mean = fixed.mean(totals, 2.0, 2, reply)
    assert all(torch.equal(mean[name], counted[name]) for name in counted)
    with pytest.raises(ProtocolError, match="not finite"):
        fixed.encode({"a": torch.full((1, 1, 3), float("nan")), "b": torch.ones(1, 1, 1)})
    with pytest.raises(SpecError, match="real numbers"):
        fixed.encode({"a": torch.zeros(3, dtype=torch.int64)})


def test_weights_are_applied_by_the_clients() -> None:
    fixed = FixedPoint.of(Privacy(secure=True, secure_bits=64))
    values, weights = torch.randn(3, 1, 1, 4, dtype=torch.float64), [0.5, 1.0, 1.7]
    rows = [fixed.encode({"a": v}, w) for v, w in zip(values, weights, strict=True)]
    total = {"a": sum(whole["a"] for whole, _, _ in rows)}
    mean = fixed.mean(total, sum(weights), 3, {"a": values[0]})
    counted = sum(w * row["a"] for w, (_, row, _) in zip(weights, rows, strict=True)) / sum(weights)
    torch.testing.assert_close(mean["a"], counted, rtol=0, atol=1e-15)
    torch.testing.assert_close(
        counted, sum(w * v for w, v in zip(weights, values, strict=True)) / 3.2, rtol=0, atol=1e-10
    )
