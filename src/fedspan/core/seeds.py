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
import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

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


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        after_in_child=_unlock_in_child
    )  # another thread may hold the lock at a fork


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
            for generator in used if seed is not None else ():
                generator.manual_seed(seed)  # type: ignore[arg-type]
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


def keys(seeds: tuple[int, ...], purpose: str, *path: int) -> Keys:
    """The same stream in each of several runs: one key per run."""
    return np.array([key(seed, purpose, *path) for seed in seeds], np.uint64)


def keys_of_rounds(seeds: tuple[int, ...], purpose: str, rounds: range, *path: int) -> Keys:
    """`keys(seeds, purpose, t, *path)` of several rounds t at once, (rounds, runs)."""
    found = children(
        np.array([[_root(seed, purpose) for seed in seeds]], np.uint64), np.array(rounds)[:, None]
    )
    for part in path:
        found = children(found, np.array([part]))
    return found


def children(parents: Keys, ids: npt.NDArray[np.int64]) -> Keys:
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


def integers(of: Keys, n: int, high: int | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """n integers in [0, high) from each stream, with replacement (bias at most high / 2^32).

    Each 64-bit output gives two: first all upper halves, then all lower halves.
    """
    whole = bits(of, (n + 1) // 2)
    halves = np.concatenate([whole >> _HALF, whole & _LOWER], -1)[..., :n]
    halves *= np.asarray(high, np.uint64)
    halves >>= _HALF
    return halves.view(np.int64)


def uniform(of: Keys, n: int) -> npt.NDArray[np.float64]:
    """n numbers in (0, 1) from each stream: 53 random bits, and never an end point."""
    return ((bits(of, n) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def normal(of: Keys, n: int) -> npt.NDArray[np.float64]:
    """n standard normal numbers in float64 from each stream: the inverse of their distribution at uniform numbers.

    torch's erfinv is several times as fast as plain arithmetic, but its accuracy depends on the platform. A sample of
    it is checked; if that is off, plain arithmetic is used.
    """
    u = uniform(of, n).reshape(-1)
    fast = torch.from_numpy(2.0 * u - 1.0).erfinv_().mul_(math.sqrt(2)).numpy()
    some = slice(None, None, max(1, u.size // 64))
    if u.size and not np.abs(fast[some] - _normal_at(u[some])).max() <= 1e-13:
        fast = np.concatenate(
            [_normal_at(part) for part in np.array_split(u, u.size // _PIECE + 1)]
        )
    return fast.reshape(*of.shape, n)


# Wichura's algorithm AS241 (1988), PPND16: rational functions for the middle, the flanks and the far tails, from the
# lowest power on. Plain sums and products round the same on every machine.
_MIDDLE = (
    (3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4,
     4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3),
    (1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3,
     2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3),
)  # fmt: skip
_FLANK = (
    (1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0, 3.64784832476320460504e0,
     1.27045825245236838258e0, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4),
    (1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1,
     1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4, 1.05075007164441684324e-9),
)  # fmt: skip
_TAIL = (
    (6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0, 2.96560571828504891230e-1,
     2.65321895265761230930e-2, 1.24266094738807843860e-3, 2.71155556874348757815e-5, 2.01033439929228813265e-7),
    (1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2,
     7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7, 2.04426310338993978564e-15),
)  # fmt: skip


_PIECE = 8_000


def _normal_at(u: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    q = u - 0.5
    out = q * _ratio(_MIDDLE, 0.180625 - q * q)
    outside = np.abs(q) > 0.425
    far = u[outside]
    r = np.sqrt(-np.log(np.minimum(far, 1.0 - far)))
    values = _ratio(_FLANK, r - 1.6)
    if (deep := r > 5.0).any():
        values[deep] = _ratio(_TAIL, r[deep] - 5.0)
    out[outside] = np.copysign(values, q[outside])
    return out


def _ratio(
    of: tuple[tuple[float, ...], tuple[float, ...]], x: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Quotient of two polynomials, by Horner's rule."""
    top, bottom = np.full_like(x, of[0][-1]), np.full_like(x, of[1][-1])
    for a, b in zip(of[0][-2::-1], of[1][-2::-1], strict=True):
        top *= x
        top += a
        bottom *= x
        bottom += b
    top /= bottom
    return top


def choose(of: Keys, population: int, size: int) -> npt.NDArray[np.int64]:
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


def _below(drawn: Keys, high: Keys) -> npt.NDArray[np.int64]:
    """The upper half of the 128-bit product: numbers in [0, high), high < 2^32, with a bias of high / 2^64."""
    return (((drawn >> _HALF) * high + ((drawn & _LOWER) * high >> _HALF)) >> _HALF).view(np.int64)


def permute(of: Keys, n: int) -> npt.NDArray[np.int64]:
    """A random order of 0..n-1 from each stream: the order of n 64-bit draws."""
    return np.argsort(bits(of, n), axis=-1, kind="stable").astype(np.int64)
