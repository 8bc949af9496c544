"""Projectors as values: a kind of random subspace and its rank. Both ends draw the same one from the common seed.

Any P with P Pᵀ = I and E[PᵀP] = (r/d) I serves the theory. Draws are made block by block in a fixed order from the
bit stream of `core.seeds`, in float64 on the CPU, and cast to the layout's type last.
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
from fedspan.core.errors import SpecError, count_or_ratio
from fedspan.core.layout import Block, Layout
from fedspan.core.linear import Factor, LinearMap


class Ranks(dict[str, int | float]):
    """Name pattern of a block → rank; the first that matches counts."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


@dataclass(frozen=True, kw_only=True)
class Projector(ABC):
    """A distribution of subspaces. `rank` is a number of directions (20), a share of them (0.2), or one by layer."""

    rank: int | float | Mapping[str, int | float]

    def __post_init__(self) -> None:
        if isinstance(self.rank, Mapping):
            object.__setattr__(self, "rank", Ranks(self.rank))
        for rank in self.rank.values() if isinstance(self.rank, Mapping) else (self.rank,):
            count_or_ratio("rank", rank)

    def rank_of(self, block: Block) -> int:
        """r for one block."""
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
        return sum(b.size if b.axis is None else b.size // b.inputs * self.rank_of(b) for b in layout.blocks)

    def asked(self, block: Block) -> int | float:
        """What `rank` says of one block: a number of directions or a share of them."""
        if not isinstance(self.rank, Mapping):
            return self.rank
        for pattern, rank in self.rank.items():
            if fnmatch.fnmatch(block.name, pattern):
                return rank
        raise SpecError(f"`rank` has no pattern for block {block.name!r}; add '*' = … for all others")

    @abstractmethod
    def factor(self, inputs: int, rank: int, keys: seeds.Keys, dtype: torch.dtype) -> Factor | None:
        """Draw P for one block, one for each key; None means the block goes whole."""

    def sample(self, layout: Layout, keys: seeds.Keys) -> LinearMap:
        """Draw P for every projected block of a layout; `keys` has one key a run."""
        factors: list[Factor | None] = []
        for number, block in enumerate(layout.blocks):
            if block.axis is None:
                factors.append(None)
                continue
            own = seeds.children(keys, np.full(keys.shape, number))
            factors.append(self.factor(block.inputs, self.rank_of(block), own, layout.dtype))
        probe = torch.zeros(len(keys), 1, 1, dtype=torch.float64)
        return LinearMap(layout, tuple(factors), sum((f.probe() for f in factors if f is not None), start=probe))


SMALL = 1 << 18  # numbers of P below which several epochs are drawn at once
AHEAD = 16


@functools.lru_cache(maxsize=64)
def draw(projector: Projector, layout: Layout, of_runs: tuple[int, ...], epoch: int) -> LinearMap:
    """The projector of one refresh epoch; cached, because both ends and several steps of a round ask for it."""
    numbers = sum(projector.rank_of(b) * b.inputs for b in layout.blocks if b.axis is not None)
    ahead = AHEAD if numbers <= SMALL // AHEAD else 1
    return _epochs(projector, layout, of_runs, epoch // ahead, ahead)[epoch % ahead]


@functools.lru_cache(maxsize=16)
def _epochs(projector: Projector, layout: Layout, of_runs: tuple[int, ...], part: int, ahead: int) -> list[LinearMap]:
    """`ahead` consecutive epochs in one draw; each depends on its own key alone, so this changes no bit."""
    epochs = range(part * ahead, (part + 1) * ahead)
    keys = np.concatenate([seeds.keys(of_runs, "projector", epoch) for epoch in epochs])
    together, runs = projector.sample(layout, keys), len(of_runs)
    return [together.cut(slice(i * runs, (i + 1) * runs)) for i in range(ahead)]
