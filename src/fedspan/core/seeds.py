"""The only randomness in fedspan: a counter-based bit stream that is the same on every machine.

SplitMix64 (Steele, Lea and Flood 2014): output n of the stream with key k is mix(k + n·γ) in 64-bit integers. There is
no state: output n of any stream is drawn directly, a whole cohort draws in one vectorized call, and a client's draws
depend only on (seed, purpose, round, client), never on who else takes part.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import os
import statistics
import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from fedspan.core.layout import Floats, Ints, Seeds

Keys = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # γ: 2^64 divided by the golden ratio, odd
_CHILD = 0xD1B54A32D192ED03  # keeps the keys of children apart from the outputs of their parent
_MUL_1, _MUL_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_NP_MUL_1, _NP_MUL_2 = np.uint64(_MUL_1), np.uint64(_MUL_2)
_HALF, _LOWER = np.uint64(32), np.uint64(0xFFFFFFFF)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)


_torch = threading.RLock()  # torch's default generator is one for all threads


def _unlock_in_child() -> None:
    global _torch
    _torch = threading.RLock()


if hasattr(os, "register_at_fork"):  # another thread may hold the lock at a fork
    os.register_at_fork(after_in_child=_unlock_in_child)


@contextlib.contextmanager
def torch_generator(seed: int | None = None, *also: torch.Generator) -> Iterator[None]:
    """Gives torch's default generator, and others, to this thread alone, and restores them afterwards.

    Args:
        seed: Where they start; by default where they are.
        also: Generators besides the default one.
    """
    used = (torch.default_generator, *also)
    with _torch:
        before = [generator.get_state() for generator in used]
        try:
            if seed is not None:
                for generator in used:
                    generator.manual_seed(seed)
            yield
        finally:
            for generator, state in zip(used, before, strict=True):
                generator.set_state(state)


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


def keys(seeds: Seeds, purpose: str, *path: int) -> Keys:
    """The same stream in each of several runs: one key per run."""
    return np.array([key(seed, purpose, *path) for seed in seeds], np.uint64)


def keys_of_rounds(seeds: Seeds, purpose: str, rounds: range, *path: int) -> Keys:
    """`keys(seeds, purpose, t, *path)` of several rounds t at once, (rounds, runs)."""
    found = children(keys(seeds, purpose), np.array(rounds)[:, None])
    for part in path:
        found = children(found, np.array([part]))
    return found


def children(parents: Keys, ids: Ints) -> Keys:
    """Keys of numbered sub-streams, such as one per client; `key(..., i)` for whole arrays of i."""
    return _mix(_mix(parents ^ np.uint64(_CHILD)) + ids.astype(np.uint64) * np.uint64(_GOLDEN))


def bits(of: Keys, n: int) -> Keys:
    """The first n outputs of each stream, on a new last axis."""
    return _mix(of[..., None] + _counter(n))


@functools.lru_cache(maxsize=32)
def _counter(n: int) -> Keys:
    return np.arange(1, n + 1, dtype=np.uint64) * np.uint64(_GOLDEN)


def later(of: Keys, start: int) -> Keys:
    """The same streams from output number `start` on, for draws in pieces."""
    return of + np.uint64(start * _GOLDEN & _MASK)


def integers(of: Keys, n: int, high: int | Ints) -> Ints:
    """n integers in [0, high) from each stream, with replacement (bias at most high / 2^32).

    Each 64-bit output gives two: first all upper halves, then all lower halves.
    """
    whole = bits(of, (n + 1) // 2)
    halves = np.concatenate([whole >> _HALF, whole & _LOWER], -1)[..., :n]
    halves *= np.asarray(high, np.uint64)
    halves >>= _HALF
    return halves.view(np.int64)


def uniform(of: Keys, n: int) -> Floats:
    """n numbers in (0, 1) from each stream: 53 random bits, and never an end point."""
    return ((bits(of, n) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def normal(of: Keys, n: int) -> Floats:
    """Return n standard normal numbers in float64 from each stream: the inverse of their distribution at uniform ones.

    torch's erfinv is fast, but its accuracy depends on the platform. A sample of it is compared with Wichura's
    algorithm AS241 (1988) as Python has it, which takes its place where they differ.
    """
    u = uniform(of, n).reshape(-1)
    fast = torch.from_numpy(2.0 * u - 1.0).erfinv_().mul_(math.sqrt(2)).numpy()
    exact = statistics.NormalDist().inv_cdf
    some = slice(None, None, max(1, u.size // 64))
    off = np.abs(fast[some] - [exact(p) for p in u[some].tolist()])
    if not (off <= 1e-13).all():
        fast = np.array([exact(p) for p in u.tolist()])
    return fast.reshape(*of.shape, n)


def choose(of: Keys, population: int, size: int) -> Ints:
    """`size` different numbers below `population` from each stream, sorted; Floyd's method (Bentley and Floyd 1987).

    Step j picks a number up to its own top, population − size + j, and takes the top itself if the pick is taken. A
    pick is taken if an earlier step picked it too, or if it is the top of an earlier step that fell back on it. Chains
    of the second kind are short, so a few sweeps over all steps resolve them.
    """
    tops = np.arange(population - size, population)
    picks = _below(bits(of, size), (tops + 1).astype(np.uint64))
    order = np.argsort(picks, -1, kind="stable")
    ranked = np.take_along_axis(picks, order, -1)
    again = np.zeros(picks.shape, np.bool_)
    np.put_along_axis(again, order[..., 1:], ranked[..., 1:] == ranked[..., :-1], -1)
    is_top, step = (picks >= tops[0]) & (picks < tops), np.maximum(picks - tops[0], 0)
    taken = again
    while True:
        settled = again | (is_top & np.take_along_axis(taken, step, -1))
        if np.array_equal(settled, taken):
            return np.sort(np.where(taken, tops, picks), -1)
        taken = settled


def _below(drawn: Keys, high: Keys) -> Ints:
    """The upper half of the 128-bit product: numbers in [0, high), high < 2^32, with a bias of high / 2^64."""
    return (((drawn >> _HALF) * high + ((drawn & _LOWER) * high >> _HALF)) >> _HALF).view(np.int64)


def permute(of: Keys, n: int) -> Ints:
    """A random order of 0..n-1 from each stream: the order of n 64-bit draws."""
    return np.argsort(bits(of, n), axis=-1, kind="stable").astype(np.int64)
