"""What a secure sum is made of: shares, keys, masks, and a session on disk."""

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


from fedspan.replies.secure import client as secure_client
from fedspan.replies.secure import shares as secure_shares
from fedspan.replies.secure.keys import (
    CHUNK,
    add_mask,
    agreed_key,
    new_key,
    public_key,
    seal,
    unseal,
)
from support.secure import at


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
    same = (
        agreed_key(a, public_key(b), "mask", b"s", 1, 2),
        agreed_key(b, public_key(a), "mask", b"s", 1, 2),
    )
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
    stored = secure_client.Session.of({k: v.clone() for k, v in sessions[1].arrays().items()})
    first, second = (
        secure_client.unmask(one, messages[1])[1]["shares"] for one in (sessions[1], stored)
    )
    assert torch.equal(first, second)
    assert (stored.answered, stored.client) == (sessions[1].answered, sessions[1].client)
    with pytest.raises(TypeError):
        secure_client.Session.of({"answered": torch.tensor([1])})


# Signed keys.
