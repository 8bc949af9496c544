"""The only randomness in fedspan: a counter-based bit stream that is the same on every machine.

SplitMix64 (Steele, Lea and Flood 2014): output n of the stream with key k is mix(k + n·γ) in 64-bit integers. There is
no state to carry: any party draws number n of any stream directly, a whole cohort draws in one vectorised call, and a
client's draws depend on (seed, purpose, round, client) alone, never on who else takes part.
"""

from __future__ import annotations

import functools
import hashlib
import math

import numpy as np
import numpy.typing as npt
import torch

Keys = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # γ: 2^64 divided by the golden ratio, odd
_CHILD = 0xD1B54A32D192ED03  # keeps a child's key away from its parent's own outputs
_MUL_1, _MUL_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_NP_MUL_1, _NP_MUL_2 = np.uint64(_MUL_1), np.uint64(_MUL_2)
_HALF, _LOWER = np.uint64(32), np.uint64(0xFFFFFFFF)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)


def _mix_int(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MUL_1) & _MASK
    z = ((z ^ (z >> 27)) * _MUL_2) & _MASK
    return z ^ (z >> 31)


def _mix(z: Keys) -> Keys:
    z = z ^ (z >> _SHIFT_1)
    z *= _NP_MUL_1
    z ^= z >> _SHIFT_2
    z *= _NP_MUL_2
    z ^= z >> _SHIFT_3
    return z


@functools.lru_cache(maxsize=256)
def _root(seed: int, purpose: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def key(seed: int, purpose: str, *path: int) -> int:
    """The key of one stream, e.g. `key(seed, "projector", round)`."""
    k = _root(seed, purpose)
    for part in path:
        k = _mix_int((_mix_int(k ^ _CHILD) + part * _GOLDEN) & _MASK)
    return k


def keys(seeds: tuple[int, ...], purpose: str, *path: int) -> Keys:
    """The same stream in each of several runs: one key a run."""
    return np.array([key(seed, purpose, *path) for seed in seeds], np.uint64)


def children(parents: Keys, ids: npt.NDArray[np.int64]) -> Keys:
    """Keys of numbered sub-streams, such as one a client; `key(..., i)` for whole arrays of i."""
    return _mix(_mix(parents ^ np.uint64(_CHILD)) + ids.astype(np.uint64) * np.uint64(_GOLDEN))


def bits(of: Keys, n: int) -> Keys:
    """The first n outputs of each stream, on a new last axis."""
    return _mix(of[..., None] + _counter(n))


@functools.lru_cache(maxsize=32)
def _counter(n: int) -> Keys:
    return np.arange(1, n + 1, dtype=np.uint64) * np.uint64(_GOLDEN)


def integers(of: Keys, n: int, high: int | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """n integers in [0, high) from each stream, with replacement (bias at most high / 2^32).

    Each 64-bit output makes two: first all upper halves, then all lower halves.
    """
    whole = bits(of, (n + 1) // 2)
    halves = np.concatenate([whole >> _HALF, whole & _LOWER], -1)[..., :n]
    halves *= np.asarray(high, np.uint64)
    halves >>= _HALF
    return halves.view(np.int64)


def uniform(of: Keys, n: int) -> npt.NDArray[np.float64]:
    """n numbers in (0, 1) from each stream: 53 random bits and never an end point."""
    return ((bits(of, n) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def normal(of: Keys, n: int) -> npt.NDArray[np.float64]:
    """n standard normal numbers in float64 from each stream, by inverting their distribution: √2 erfinv(2u − 1)."""
    u = torch.from_numpy(uniform(of, n))
    result: npt.NDArray[np.float64] = u.mul_(2).sub_(1).erfinv_().mul_(math.sqrt(2)).numpy()
    return result


def choose(of: Keys, population: int, size: int) -> npt.NDArray[np.int64]:
    """`size` different numbers below `population` from each stream, sorted; O(size) by Floyd's method."""
    below = np.arange(population - size + 1, population + 1, dtype=np.uint64)
    picks = ((bits(of, size) >> _HALF) * below) >> _HALF  # number j is below population − size + j + 1
    chosen = []
    for row in picks.reshape(-1, size).tolist():
        taken: set[int] = set()
        for top, pick in enumerate(row, population - size):
            taken.add(top if pick in taken else pick)
        chosen.append(sorted(taken))
    return np.array(chosen, np.int64).reshape(*of.shape, size)


def permute(of: Keys, n: int) -> npt.NDArray[np.int64]:
    """A random order of 0..n-1 from each stream: the order of n 64-bit draws."""
    return np.argsort(bits(of, n), axis=-1, kind="stable").astype(np.int64)
