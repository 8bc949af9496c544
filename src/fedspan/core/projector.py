"""Random subspaces: P as something that can be applied, and the distribution from which both ends draw it.

A `Factor` is P of one block: a weight W (out × in) becomes W Pᵀ (out × r). A `LinearMap` joins the factors of all
blocks: `P @ v` goes from d numbers to r, `P.T @ z` back. P is never a d × d array, nor one r × d array for a model.

A `Projector` is a kind of random subspace and its rank. Any P with P Pᵀ = I and E[PᵀP] = (r/d) I satisfies the theory.
Server and clients draw the same P from the shared seed: block by block in a fixed order from the bit stream of
`core.seeds`, in float64 on the CPU, cast to the type of the layout last.
"""

from __future__ import annotations

import fnmatch
import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from fedspan.core import seeds
from fedspan.core.errors import ProtocolError, SpecError, count_or_ratio
from fedspan.core.layout import Block, Layout, Vector

PROBE_TOLERANCE = 1e-9  # far above rounding between machines (1e-12), far below any real difference
Rank = int | float | Mapping[str, int | float]  # a number of directions, a share of them, or one per name pattern


class Factor(Protocol):
    """P of one block: r orthonormal rows over its d inputs, applied to the last axis."""

    @property
    def rank(self) -> int:
        """r."""

    def down(self, v: torch.Tensor) -> torch.Tensor:
        """v Pᵀ: (runs, n, d) → (runs, n, r)."""

    def up(self, z: torch.Tensor) -> torch.Tensor:
        """z P: (runs, n, r) → (runs, n, d)."""

    def columns(self) -> torch.Tensor:
        """Pᵀ as an array (runs, d, r), for tasks that multiply their data by it."""

    def probe(self) -> torch.Tensor:
        """One float64 number per run that differs between different P; shape (runs, 1, 1)."""

    def cut(self, runs: slice) -> Factor:
        """The same for some of the runs."""

    def to(self, device: torch.device) -> Factor:
        """The same on another device."""


@runtime_checkable
class CoordinateFactor(Factor, Protocol):
    """A factor that picks r of the d inputs: applying it is a gather, without a product."""

    @property
    def index(self) -> torch.Tensor:
        """Which inputs, (runs, 1, r)."""


def picked(factor: Factor | None) -> torch.Tensor | None:
    """The inputs that a factor picks; None if it is not a choice of coordinates."""
    return getattr(factor, "index", None)  # isinstance of a Protocol takes longer than the gather itself


@dataclass(frozen=True, eq=False)
class LinearMap:
    """P_t of a whole layout: one factor per projected block, None for a block that is sent in full."""

    layout: Layout
    factors: tuple[Factor | None, ...]
    probe: torch.Tensor  # one number per run, (runs, 1, 1) in float64; sent with each download
    sizes: tuple[int, ...] = field(init=False)  # numbers that each block has inside the subspace
    rank: int = field(init=False)  # numbers that are sent instead of d

    def __post_init__(self) -> None:
        pairs = zip(self.factors, self.layout.blocks, strict=True)
        sizes = tuple([b.size if f is None else f.rank * b.rest for f, b in pairs])
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "rank", sum(sizes))

    def __matmul__(self, v: Vector) -> Vector:
        """P v."""
        if v.is_meta:  # a dry run: only the shape matters
            return v.new_empty(*v.shape[:2], self.rank)
        if len(self.factors) == 1:
            return _down(self.factors[0], self.layout.blocks[0], v)
        sizes = [block.size for block in self.layout.blocks]
        parts = zip(self.factors, self.layout.blocks, v.split(sizes, -1), strict=True)
        return torch.cat([_down(f, b, part) for f, b, part in parts], -1)

    @property
    def T(self) -> Transposed:  # noqa: N802 (as in torch and numpy)
        """Pᵀ."""
        return Transposed(self)

    def cut(self, runs: slice) -> LinearMap:
        """The same for some of the runs."""
        return LinearMap(self.layout, tuple(f and f.cut(runs) for f in self.factors), self.probe[runs])

    def agree(self, probe: torch.Tensor) -> None:
        """Raises ProtocolError unless the other end drew the same P."""
        if probe is self.probe:
            return
        if not torch.allclose(probe, self.probe, rtol=PROBE_TOLERANCE, atol=PROBE_TOLERANCE):
            raise ProtocolError(
                f"this client drew another projector (probe {self.probe.flatten().tolist()}) than the server "
                f"(probe {probe.flatten().tolist()}); give both the same seed, projector and fedspan version"
            )


@dataclass(frozen=True, eq=False)
class Transposed:
    """Pᵀ of a LinearMap."""

    of: LinearMap

    def __matmul__(self, z: Vector) -> Vector:
        """Pᵀ z."""
        P = self.of
        if z.is_meta:
            return z.new_empty(*z.shape[:2], P.layout.size)
        if len(P.factors) == 1:
            return _up(P.factors[0], P.layout.blocks[0], z)
        out = z.new_empty(*z.shape[:2], P.layout.size)  # filled block by block: no second vector of this length
        places, parts = out.split([block.size for block in P.layout.blocks], -1), z.split(list(P.sizes), -1)
        for place, factor, block, part in zip(places, P.factors, P.layout.blocks, parts, strict=True):
            _fill(place, factor, block, part)
        return out

    def plus(self, z: Vector, x: Vector, overwrite: bool = False) -> Vector:
        """x + Pᵀz, with one new vector of this length; with `overwrite` in x itself."""
        if overwrite:
            if z.is_meta:
                return x
            P, parts = self.of, z.split(list(self.of.sizes), -1)
            places = x.split([block.size for block in P.layout.blocks], -1)
            for place, factor, block, part in zip(places, P.factors, P.layout.blocks, parts, strict=True):
                _fill(place, factor, block, part, add=True)
            return x
        moved = self @ z
        return x + moved if moved is z or moved.shape[1] < x.shape[1] else moved.add_(x)


def _down(factor: Factor | None, block: Block, v: Vector) -> Vector:
    if factor is None:
        return v
    if block.size != block.inputs and (index := picked(factor)) is not None:
        full, index = _columns(index, block, v)
        return full.gather(-1, index).flatten(2)
    runs, clients, _ = v.shape
    return factor.down(block.rows(v)).view(runs, clients, -1)


def _columns(index: torch.Tensor, block: Block, v: Vector) -> tuple[torch.Tensor, torch.Tensor]:
    """(v with the projected axis last, the picked columns of every row): views, so that nothing is copied."""
    full = v.unflatten(-1, block.shape).movedim(block.input_axis + 2, -1)
    return full, index.view(len(index), *[1] * (full.dim() - 2), -1).expand(*full.shape[:-1], -1)


def _fill(place: Vector, factor: Factor | None, block: Block, z: Vector, add: bool = False) -> None:
    """Writes Pᵀz of one block to its place, or adds it; coordinates without another copy of the block."""
    if (index := picked(factor)) is None:
        up = _up(factor, block, z)
        (place.add_ if add else place.copy_)(up)
        return
    full, index = _columns(index, block, place)
    if add:
        full.scatter_add_(-1, index, z.reshape(index.shape))
    else:
        full.zero_().scatter_(-1, index, z.reshape(index.shape))


def _up(factor: Factor | None, block: Block, z: Vector) -> Vector:
    if factor is None:
        return z
    runs, clients, _ = z.shape
    return block.vector(factor.up(z.reshape(runs, clients * block.rest, -1)), clients)


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
    """

    rank: Rank = 0.1  # directions per block: a number, a share of its inputs, or a table by name pattern

    def __post_init__(self) -> None:
        if isinstance(self.rank, Mapping):
            object.__setattr__(self, "rank", Ranks(self.rank))
        for rank in self.rank.values() if isinstance(self.rank, Mapping) else (self.rank,):
            count_or_ratio("rank", rank)

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
        raise SpecError(f"`rank` has no pattern for block {block.name!r}; add '*' = … for all others")

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
        return LinearMap(layout, tuple(factors), sum((f.probe() for f in factors if f is not None), start=probe))

    def of_epochs(self, layout: Layout, of_runs: tuple[int, ...], epochs: range) -> LinearMap:
        """P of consecutive epochs of all runs: those of the first epoch, then those of the next."""
        return self.sample(layout, seeds.keys_of_rounds(of_runs, "projector", epochs).reshape(-1))


_sound: set[tuple[Projector, int, int, torch.dtype]] = set()  # what `_check_once` has seen


def _check_once(projector: Projector, factor: Factor | None, inputs: int, dtype: torch.dtype) -> None:
    """Raises SpecError unless P Pᵀ z = z for a random z, in the first draw of a projector for a block of this width."""
    if factor is None or (seen := (projector, inputs, factor.rank, dtype)) in _sound:
        return
    z = torch.randn(1, 1, factor.rank, dtype=dtype, generator=torch.Generator().manual_seed(0))
    try:
        one = factor.cut(slice(0, 1))
        error = float((one.down(one.up(z)) - z).norm() / z.norm())
    except RuntimeError as shapes:
        raise SpecError(f"the projector {type(projector).__name__} cannot apply its P: {shapes}") from None
    if not error < 1e4 * torch.finfo(dtype).eps:
        raise SpecError(
            f"the rows of P that the projector {type(projector).__name__} draws are not orthonormal: P Pᵀz is off by "
            f"{error:.2g} times the length of z; orthonormalize them, for example by torch.linalg.qr"
        )
    _sound.add(seen)


SMALL = 1 << 18  # numbers of P below which several epochs are drawn at once
AT_ONCE = 16  # epochs


@functools.lru_cache(maxsize=64)
def draw(projector: Projector, layout: Layout, of_runs: tuple[int, ...], epoch: int) -> LinearMap:
    """P of one epoch between two refreshes; cached, because both ends and several steps of a round ask for it."""
    ahead = _ahead(projector, layout)
    return _epochs(projector, layout, of_runs, epoch // ahead, ahead)[epoch % ahead]


@functools.lru_cache(maxsize=16)
def _ahead(projector: Projector, layout: Layout) -> int:
    """How many epochs are drawn at once."""
    numbers = sum(projector.rank_of(b) * b.inputs for b in layout.blocks if b.axis is not None)
    return AT_ONCE if numbers <= SMALL // AT_ONCE else 1


@functools.lru_cache(maxsize=16)
def _epochs(projector: Projector, layout: Layout, of_runs: tuple[int, ...], part: int, ahead: int) -> list[LinearMap]:
    """`ahead` consecutive epochs in one draw; each depends on its own key only, so this changes no bit."""
    drawn, runs = projector.of_epochs(layout, of_runs, range(part * ahead, (part + 1) * ahead)), len(of_runs)
    return [drawn.cut(slice(i * runs, (i + 1) * runs)) for i in range(ahead)]
