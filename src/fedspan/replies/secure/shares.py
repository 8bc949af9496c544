"""Shamir's shares of 32 bytes: any t of them give the secret, t − 1 tell nothing (Shamir 1979).

The secret is the value at 0 of a random polynomial of degree t − 1 over a prime field; a share is its value at the
holder's point.
"""

from __future__ import annotations

import functools
import itertools
import secrets
from collections.abc import Callable, Mapping, Sequence

from fedspan.core.errors import ProtocolError

PRIME = 2**256 + 297  # the smallest prime above 2^256
SHARE = 33  # bytes of a share
MOST_TRIES = 200  # subsets of shares that are tried where some are wrong


def split(secret: bytes, threshold: int, points: Sequence[int]) -> list[bytes]:
    """One share for each point, of which `threshold` give the secret."""
    coefficients = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    shares = []
    for point in points:
        value = 0
        for coefficient in (*coefficients, int.from_bytes(secret, "big")):
            value = (value * point + coefficient) % PRIME
        shares.append(value.to_bytes(SHARE, "big"))
    return shares


def combine(shares: Mapping[int, bytes]) -> bytes | None:
    """The secret of shares, given by point; None where they cannot be shares of 32 bytes."""
    value = _value_at(0, shares)
    return value.to_bytes(32, "big") if value < 2**256 else None


def recover(
    shares: Mapping[int, bytes], threshold: int, public: Callable[[bytes], bytes], known: bytes
) -> tuple[bytes, list[int]]:
    """(the secret whose `public` is known, the points whose share is wrong).

    Raises:
        ProtocolError: There are too few right shares, or more wrong ones than can be searched for.
    """
    valid = sorted(p for p, share in shares.items() if int.from_bytes(share, "big") < PRIME)
    ring = valid * 2 if len(valid) >= threshold else []
    # neighbors on a ring, each of which leaves out other points, then a number of any others
    neighbors = (sorted(ring[start : start + threshold]) for start in range(len(ring) // 2))
    others = itertools.islice(itertools.combinations(valid, threshold), MOST_TRIES)
    for chosen in dict.fromkeys(map(tuple, itertools.chain(neighbors, others))):
        good = {point: shares[point] for point in chosen}
        secret = combine(good)
        if secret is not None and public(secret) == known:
            return secret, [
                p for p, s in shares.items() if _value_at(p, good) != int.from_bytes(s, "big")
            ]
    raise ProtocolError(
        f"{len(valid)} shares do not give the secret, of which {threshold} right ones are needed"
    )


def _value_at(x: int, shares: Mapping[int, bytes]) -> int:
    weights = _lagrange(x, tuple(shares))
    values = (int.from_bytes(share, "big") for share in shares.values())
    return sum(w * value for w, value in zip(weights, values, strict=True)) % PRIME


@functools.lru_cache(
    maxsize=1024
)  # all secrets of a session are recovered from shares at the same points
def _lagrange(x: int, points: tuple[int, ...]) -> list[int]:
    """Weights of the values at `points` in the value at x."""
    weights = []
    for one in points:
        above = below = 1
        for other in points:
            if other != one:
                above, below = above * (x - other) % PRIME, below * (one - other) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return weights
