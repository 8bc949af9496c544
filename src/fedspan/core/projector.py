"""Random subspaces: how both ends draw P, and how it is applied.

A `Projector` is a kind of random subspace and its rank. Any P with P Pᵀ = I and E[PᵀP] = (r/d) I satisfies the theory.
Server and clients draw the same P from the shared seed: block by block in a fixed order from the bit stream of
`core.seeds`, in float64 on the CPU, cast to the type of the layout last.

A `Factor` is P of one block: a weight W (out × in) becomes W Pᵀ (out × r). A `LinearMap` joins the factors of all
blocks: `P @ v` goes from d values to r, `P.T @ z` back. P is never a d × d array, nor one r × d array for a model.
"""

from __future__ import annotations

import fnmatch
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from fedspan.core import seeds
from fedspan.core.errors import ProtocolError, SpecError, at_least, count_or_ratio
from fedspan.core.layout import Block, Layout, Seeds, Vector

PROBE_TOLERANCE = 1e-9  # far above rounding between machines (1e-12), far below any real difference
SMALL = 1 << 18  # values of P below which several epochs are drawn at once
AT_ONCE = 16  # epochs

# a number of directions, a share of them, or one per name pattern
Rank = int | float | Mapping[str, int | float]


class Factor(ABC):
    """P of one block: r orthonormal rows over its d inputs, applied to the last axis.

    A subclass is a dataclass whose tensors have the runs as their first axis.
    """

    index: Tensor | None = None  # (runs, 1, r): the inputs that P picks, if it does nothing else

    @property
    @abstractmethod
    def rank(self) -> int:
        """r."""

    @abstractmethod
    def down(self, v: Tensor) -> Tensor:
        """Return v Pᵀ: (runs, n, d) → (runs, n, r)."""

    @abstractmethod
    def up(self, z: Tensor) -> Tensor:
        """Return z P: (runs, n, r) → (runs, n, d)."""

    @abstractmethod
    def columns(self) -> Tensor:
        """Return Pᵀ as an array (runs, d, r), for tasks that multiply their data by it."""

    @abstractmethod
    def probe(self) -> Tensor:
        """Return one float64 value per run that differs between different P; shape (runs, 1, 1)."""

    def cut(self, runs: slice) -> Self:
        """Return the same for some of the runs."""
        return self._each(lambda part: part[runs])

    def to(self, device: torch.device) -> Self:
        """Return the same on another device."""
        return self._each(lambda part: part.to(device))

    def _each(self, function: Callable[[Tensor], Tensor]) -> Self:
        other = object.__new__(type(self))
        for name, part in vars(self).items():
            vars(other)[name] = function(part) if isinstance(part, Tensor) else part
        return other


def picked(factor: Factor | None) -> Tensor | None:
    """Return the inputs that a factor picks; None if it is not a choice of coordinates."""
    return None if factor is None else factor.index


class LinearMap:
    """P_t of a whole layout: one factor per projected block, None for a block that is sent in full."""

    def __init__(
        self,
        layout: Layout,
        factors: tuple[Factor | None, ...],
        probe: Tensor | None = None,
        sizes: list[int] | None = None,
    ) -> None:
        self.layout, self.factors = layout, factors
        self.whole = not any(factors)  # whether P = I
        if sizes is None:
            pairs = zip(factors, layout.blocks, strict=True)
            sizes = [b.size if f is None else f.rank * b.rest for f, b in pairs]
        if probe is None and not self.whole:
            probe = sum([f.probe() for f in factors if f is not None], start=torch.zeros(()))
        self.sizes = sizes  # values of each block inside the subspace
        self.rank = sum(sizes)  # r: values that are sent instead of d
        self.probe = probe  # one value per run, (runs, 1, 1); sent with each download

    def __matmul__(self, v: Vector) -> Vector:
        """Return P v."""
        if self.whole:
            return v
        if v.is_meta:  # a dry run: only the shape matters
            return v.new_empty(*v.shape[:2], self.rank)
        if len(self.factors) == 1:
            return _down(self.factors[0], self.layout.blocks[0], v)
        parts = v.split(self.layout.sizes, -1)
        return torch.cat([_down(*one) for one in self.by_block(parts)], -1)

    def by_block(self, parts: Iterable[Vector]) -> Iterator[tuple[Factor | None, Block, Tensor]]:
        """Return (factor, block, part) of each block."""
        return zip(self.factors, self.layout.blocks, parts, strict=True)

    @property
    def picks(self) -> bool:
        """Whether P only picks coordinates, or is I."""
        return all(factor is None or factor.index is not None for factor in self.factors)

    def squared(self, v: Vector) -> Vector:
        """Return (P∘P) v, the mean of v along each row of P weighted by its squares."""
        found = []
        for factor, block, part in self.by_block(v.split(self.layout.sizes, -1)):
            if factor is not None:
                part = (block.rows(part) @ factor.columns().square()).view(*v.shape[:2], -1)
            found.append(part)
        return torch.cat(found, -1)

    @property
    def T(self) -> Transposed:  # noqa: N802 (as in torch and numpy)
        """Pᵀ."""
        return Transposed(self)

    def cut(self, runs: slice) -> LinearMap:
        """Return the same for some of the runs."""
        factors = tuple([f and f.cut(runs) for f in self.factors])
        probe = None if self.probe is None else self.probe[runs]
        return LinearMap(self.layout, factors, probe, self.sizes)

    def agree(self, probe: Tensor | None) -> None:
        """Raise ProtocolError unless the other end drew the same P."""
        own = self.probe
        if probe is own:
            return
        if own is None or probe is None:
            raise ProtocolError("only one end has a projector; give both the same method")
        if not torch.allclose(probe, own, rtol=PROBE_TOLERANCE, atol=PROBE_TOLERANCE):
            raise ProtocolError(
                f"this client drew another projector (probe {own.flatten().tolist()}) than the server "
                f"(probe {probe.flatten().tolist()}); give both the same seed, projector and fedspan version"
            )


class Transposed:
    """Pᵀ of a LinearMap."""

    def __init__(self, of: LinearMap) -> None:
        self.of = of

    def __matmul__(self, z: Vector) -> Vector:
        """Return Pᵀ z."""
        P = self.of
        if P.whole:
            return z
        if z.is_meta:
            return z.new_empty(*z.shape[:2], P.layout.size)
        if len(P.factors) == 1:
            return _up(P.factors[0], P.layout.blocks[0], z)
        out = z.new_zeros(*z.shape[:2], P.layout.size)  # no second vector of this length
        self._add(z, out)
        return out

    def _add(self, z: Vector, x: Vector) -> None:
        """Add Pᵀz to x in place, block by block; coordinates without a copy of the block."""
        P, places = self.of, x.split(self.of.layout.sizes, -1)
        for (factor, block, part), place in zip(
            P.by_block(z.split(P.sizes, -1)), places, strict=True
        ):
            if (index := picked(factor)) is None:
                place.add_(_up(factor, block, part))
            else:
                full, index = _columns(index, block, place)
                full.scatter_add_(-1, index, part.reshape(index.shape))

    def plus(self, z: Vector, x: Vector, overwrite: bool = False, sign: int = 1) -> Vector:
        """Return x + Pᵀz, or x − Pᵀz, with one new vector of this length; with `overwrite` in x itself."""
        if overwrite:
            if self.of.whole:
                return x.add_(z, alpha=sign)
            if not z.is_meta:
                self._add(z if sign > 0 else -z, x)
            return x
        moved = self @ z
        spare = None if moved is z or moved.shape[1] < x.shape[1] else moved
        return torch.add(x, moved, alpha=sign, out=spare)

    def put(self, z: Vector, x: Vector) -> Vector:
        """Return x with z in the place of P x: what is outside the subspace stays."""
        return z if self.of.whole else self.plus(z - self.of @ x, x)


def _down(factor: Factor | None, block: Block, v: Vector) -> Vector:
    if factor is None:
        return v
    if factor.index is not None and block.size != block.inputs:
        full, index = _columns(factor.index, block, v)
        return full.gather(-1, index).flatten(2)
    runs, clients, _ = v.shape
    rows = v.reshape(runs, -1, block.inputs) if block.inputs_last else block.rows(v)
    return factor.down(rows).view(runs, clients, -1)


def _up(factor: Factor | None, block: Block, z: Vector) -> Vector:
    if factor is None:
        return z
    runs, clients, _ = z.shape
    rows = factor.up(z.reshape(runs, clients * block.rest, -1))
    return rows.view(runs, clients, -1) if block.inputs_last else block.vector(rows, clients)


def _columns(index: Tensor, block: Block, v: Vector) -> tuple[Tensor, Tensor]:
    """Return v with the projected axis last, and the picked columns of every row: views, so that nothing is copied."""
    full = v.unflatten(-1, block.shape).movedim(block.input_axis + 2, -1)
    return full, index.view(index.shape[0], *[1] * (full.dim() - 2), -1).expand(
        *full.shape[:-1], -1
    )


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
        for rank in self._ranks.values():
            count_or_ratio("rank", rank)
        at_least("refresh", self.refresh, 1)

    @property
    def _ranks(self) -> Mapping[str, int | float]:
        return self.rank if isinstance(self.rank, Mapping) else {"*": self.rank}

    def asked(self, block: Block) -> int | float:
        """Return what `rank` says of one block: a number of directions or a share of its inputs."""
        for pattern, rank in self._ranks.items():
            if fnmatch.fnmatch(block.name, pattern):
                return rank
        raise SpecError(
            f"`rank` has no pattern for block {block.name!r}; add '*' = … for all others"
        )

    def rank_of(self, block: Block) -> int:
        """Return r of one block."""
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
        """Return r of a whole layout: values inside the subspace."""
        return sum(b.size if b.axis is None else b.rest * self.rank_of(b) for b in layout.blocks)

    @abstractmethod
    def factor(self, inputs: int, rank: int, keys: seeds.Keys, dtype: torch.dtype) -> Factor | None:
        """Return P of one block, drawn for each key; None if the block is sent in full."""

    def sample(self, layout: Layout, keys: seeds.Keys) -> LinearMap:
        """Return P of every projected block of a layout; `keys` has one key per run."""
        factors: list[Factor | None] = []
        for number, block in enumerate(layout.blocks):
            factor = None
            if block.axis is not None:
                own = seeds.children(keys, np.full(keys.shape, number))
                factor = self.factor(block.inputs, self.rank_of(block), own, layout.dtype)
            if factor is not None:
                _check_once(self, factor, block.inputs, layout.dtype)
            factors.append(factor)
        return LinearMap(layout, tuple(factors))

    def of_epochs(self, layout: Layout, of_runs: Seeds, epochs: range) -> LinearMap:
        """Return P of consecutive epochs of all runs: those of the first epoch, then those of the next."""
        return self.sample(layout, seeds.keys_of_rounds(of_runs, "projector", epochs).reshape(-1))


_sound: set[tuple[Projector, int, int, torch.dtype]] = set()  # what `_check_once` has seen


def _check_once(projector: Projector, factor: Factor, inputs: int, dtype: torch.dtype) -> None:
    """Raise SpecError unless P Pᵀ z = z for a random z, in the first draw of a projector for a block of this width."""
    if (seen := (projector, inputs, factor.rank, dtype)) in _sound:
        return
    z = torch.randn(1, 1, factor.rank, dtype=dtype, generator=torch.Generator().manual_seed(0))
    name = type(projector).__name__
    try:
        one = factor.cut(slice(0, 1))
        error = float((one.down(one.up(z)) - z).norm() / z.norm())
    except RuntimeError as shapes:
        raise SpecError(f"the projector {name} cannot apply its P: {shapes}") from None
    if not error < 1e4 * torch.finfo(dtype).eps:
        raise SpecError(
            f"the rows of P that the projector {name} draws are not orthonormal: P Pᵀz is off by "
            f"{error:.2g} times the length of z; orthonormalize them, for example by torch.linalg.qr"
        )
    _sound.add(seen)


@functools.lru_cache(maxsize=64)
def draw(projector: Projector, layout: Layout, of_runs: Seeds, epoch: int) -> LinearMap:
    """Return P of one epoch between two refreshes; cached, because both ends and several steps of a round need it."""
    ahead = _ahead(projector, layout)
    return _epochs(projector, layout, of_runs, epoch // ahead, ahead)[epoch % ahead]


@functools.lru_cache(maxsize=16)
def _ahead(projector: Projector, layout: Layout) -> int:
    """Return how many epochs are drawn at once."""
    values = sum(projector.rank_of(b) * b.inputs for b in layout.blocks if b.axis is not None)
    return AT_ONCE if values <= SMALL // AT_ONCE else 1


@functools.lru_cache(maxsize=16)
def _epochs(
    projector: Projector, layout: Layout, of_runs: Seeds, part: int, ahead: int
) -> list[LinearMap]:
    """Return `ahead` consecutive epochs in one draw; each depends on its own key only, so this changes no bit."""
    runs, epochs = len(of_runs), range(part * ahead, (part + 1) * ahead)
    with torch.device("cpu"):  # whatever the caller's default is
        drawn = projector.of_epochs(layout, of_runs, epochs)
    return [drawn.cut(slice(i * runs, (i + 1) * runs)) for i in range(ahead)]
