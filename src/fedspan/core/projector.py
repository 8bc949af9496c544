"""Random subspaces: the distribution from which both ends draw P, a `LinearMap`.

A `Projector` is a kind of random subspace and its rank. Any P with P Pᵀ = I and E[PᵀP] = (r/d) I satisfies the theory.
Server and clients draw the same P from the shared seed: block by block in a fixed order from the bit stream of
`core.seeds`, in float64 on the CPU, cast to the type of the layout last.
"""

from __future__ import annotations

import fnmatch
import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from fedspan.core import seeds
from fedspan.core.errors import SpecError, at_least, count_or_ratio
from fedspan.core.layout import Block, Layout
from fedspan.core.linear_map import Factor, LinearMap

Rank = (
    int | float | Mapping[str, int | float]
)  # a number of directions, a share of them, or one per name pattern


class Ranks(dict[str, int | float]):
    """Name pattern of a block → rank. The first pattern that matches counts, so their order is part of the value."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, dict) and list(self.items()) == list(other.items())


@dataclass(frozen=True, kw_only=True)
class Projector(ABC):
    """A distribution of random subspaces.

    Args:
        rank: Directions per block: a whole number (20), a share of the block's inputs (0.2), or a table of these by
            pattern of the block's name (`{"head*": 1.0, "*": 0.1}`), of which the first match counts.
        refresh: Rounds after which a new P is drawn.
    """

    rank: Rank = 0.1  # directions per block: a number, a share, or a table by name pattern

    refresh: int = 1  # rounds after which a new P is drawn

    def __post_init__(self) -> None:
        if isinstance(self.rank, Mapping):
            object.__setattr__(self, "rank", Ranks(self.rank))
        for rank in self.rank.values() if isinstance(self.rank, Mapping) else (self.rank,):
            count_or_ratio("rank", rank)
        at_least("refresh", self.refresh, 1)

    def rank_of(self, block: Block) -> int:
        """r of one block."""
        rank = self.asked(block)
        if isinstance(rank, float):
            return max(1, round(rank * block.inputs))
        if rank > block.inputs:
            raise SpecError(
                f"`rank` {rank} is larger than the {block.inputs} inputs of block {block.name!r}; "
                f"use at most {block.inputs}, or a ratio in (0, 1]"
            )
        return rank

    def size(self, layout: Layout) -> int:
        """r of a whole layout: numbers inside the subspace."""
        return sum(b.size if b.axis is None else b.rest * self.rank_of(b) for b in layout.blocks)

    def asked(self, block: Block) -> int | float:
        """What `rank` says of one block: a number of directions or a share of its inputs."""
        if not isinstance(self.rank, Mapping):
            return self.rank
        for pattern, rank in self.rank.items():
            if fnmatch.fnmatch(block.name, pattern):
                return rank
        raise SpecError(
            f"`rank` has no pattern for block {block.name!r}; add '*' = … for all others"
        )

    @abstractmethod
    def factor(self, inputs: int, rank: int, keys: seeds.Keys, dtype: torch.dtype) -> Factor | None:
        """P of one block, drawn for each key; None if the block is sent in full."""

    def sample(self, layout: Layout, keys: seeds.Keys) -> LinearMap:
        """P of every projected block of a layout; `keys` has one key per run."""
        factors: list[Factor | None] = []
        for number, block in enumerate(layout.blocks):
            if block.axis is None:
                factors.append(None)
                continue
            own = seeds.children(keys, np.full(keys.shape, number))
            factors.append(self.factor(block.inputs, self.rank_of(block), own, layout.dtype))
            _check_once(self, factors[-1], block.inputs, layout.dtype)
        probe = torch.zeros(len(keys), 1, 1, dtype=torch.float64)
        return LinearMap(
            layout, tuple(factors), sum((f.probe() for f in factors if f is not None), start=probe)
        )

    def of_epochs(self, layout: Layout, of_runs: tuple[int, ...], epochs: range) -> LinearMap:
        """P of consecutive epochs of all runs: those of the first epoch, then those of the next."""
        return self.sample(layout, seeds.keys_of_rounds(of_runs, "projector", epochs).reshape(-1))


_sound: set[tuple[Projector, int, int, torch.dtype]] = set()  # what `_check_once` has seen


def _check_once(
    projector: Projector, factor: Factor | None, inputs: int, dtype: torch.dtype
) -> None:
    """Raises SpecError unless P Pᵀ z = z for a random z, in the first draw of a projector for a block of this width."""
    if factor is None or (seen := (projector, inputs, factor.rank, dtype)) in _sound:
        return
    z = torch.randn(1, 1, factor.rank, dtype=dtype, generator=torch.Generator().manual_seed(0))
    try:
        one = factor.cut(slice(0, 1))
        error = float((one.down(one.up(z)) - z).norm() / z.norm())
    except RuntimeError as shapes:
        raise SpecError(
            f"the projector {type(projector).__name__} cannot apply its P: {shapes}"
        ) from None
    if not error < 1e4 * torch.finfo(dtype).eps:
        raise SpecError(
            f"the rows of P that the projector {type(projector).__name__} draws are not orthonormal: P Pᵀz is off by "
            f"{error:.2g} times the length of z; orthonormalize them, for example by torch.linalg.qr"
        )
    _sound.add(seen)


SMALL = 1 << 18  # numbers of P below which several epochs are drawn at once
AT_ONCE = 16  # epochs


_latest: tuple[Projector, Layout, tuple[int, ...], int, LinearMap] | None = None  # of `draw`


def draw(projector: Projector, layout: Layout, of_runs: tuple[int, ...], epoch: int) -> LinearMap:
    """P of one epoch between two refreshes; cached, because both ends and several steps of a round ask for it."""
    global _latest  # hashing a layout takes longer than a round of a small model may
    held = _latest
    if (
        held is not None
        and held[3] == epoch
        and held[0] is projector
        and held[1] is layout
        and held[2] is of_runs
    ):
        return held[4]
    found = _drawn(projector, layout, of_runs, epoch)
    _latest = (projector, layout, of_runs, epoch, found)
    return found


@functools.lru_cache(maxsize=64)
def _drawn(projector: Projector, layout: Layout, of_runs: tuple[int, ...], epoch: int) -> LinearMap:
    ahead = _ahead(projector, layout)
    return _epochs(projector, layout, of_runs, epoch // ahead, ahead)[epoch % ahead]


@functools.lru_cache(maxsize=16)
def _ahead(projector: Projector, layout: Layout) -> int:
    """How many epochs are drawn at once."""
    numbers = sum(projector.rank_of(b) * b.inputs for b in layout.blocks if b.axis is not None)
    return AT_ONCE if numbers <= SMALL // AT_ONCE else 1


@functools.lru_cache(maxsize=16)
def _epochs(
    projector: Projector, layout: Layout, of_runs: tuple[int, ...], part: int, ahead: int
) -> list[LinearMap]:
    """`ahead` consecutive epochs in one draw; each depends on its own key only, so this changes no bit."""
    with torch.device("cpu"):  # whatever the caller's default is
        drawn, runs = (
            projector.of_epochs(layout, of_runs, range(part * ahead, (part + 1) * ahead)),
            len(of_runs),
        )
    return [drawn.cut(slice(i * runs, (i + 1) * runs)) for i in range(ahead)]
