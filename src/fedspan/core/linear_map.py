"""P as something that can be applied.

A `Factor` is P of one block: a weight W (out × in) becomes W Pᵀ (out × r). A `LinearMap` joins the factors of all
blocks: `P @ v` goes from d numbers to r, `P.T @ z` back. P is never a d × d array, nor one r × d array for a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from fedspan.core.errors import ProtocolError
from fedspan.core.layout import Block, Layout, Vector

PROBE_TOLERANCE = 1e-9  # far above rounding between machines (1e-12), far below any real difference


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
    return getattr(
        factor, "index", None
    )  # isinstance of a Protocol takes longer than the gather itself


@dataclass(frozen=True, eq=False)
class LinearMap:
    """P_t of a whole layout: one factor per projected block, None for a block that is sent in full."""

    layout: Layout
    factors: tuple[Factor | None, ...]
    probe: torch.Tensor  # one number per run, (runs, 1, 1) in float64; sent with each download
    sizes: tuple[int, ...] = ()  # values of each block inside the subspace; computed if not given
    rank: int = 0  # their sum: numbers that are sent instead of d
    whole: bool = False  # whether P = I

    def __post_init__(self) -> None:
        if not self.sizes:
            pairs = zip(self.factors, self.layout.blocks, strict=True)
            sizes = tuple([b.size if f is None else f.rank * b.rest for f, b in pairs])
            object.__setattr__(self, "sizes", sizes)
            object.__setattr__(self, "rank", sum(sizes))
        object.__setattr__(self, "whole", not any(self.factors))

    def __matmul__(self, v: Vector) -> Vector:
        """P v."""
        if self.whole:
            return v
        if v.is_meta:  # a dry run: only the shape matters
            return v.new_empty(*v.shape[:2], self.rank)
        if len(self.factors) == 1:
            return _down(self.factors[0], self.layout.blocks[0], v)
        sizes = [block.size for block in self.layout.blocks]
        parts = zip(self.factors, self.layout.blocks, v.split(sizes, -1), strict=True)
        return torch.cat([_down(f, b, part) for f, b, part in parts], -1)

    @property
    def picks(self) -> bool:
        """Whether P only picks coordinates, or is I."""
        return all(factor is None or picked(factor) is not None for factor in self.factors)

    def squared(self, v: Vector) -> Vector:
        """Return (P∘P) v, the mean of v along each row of P weighted by its squares."""
        sizes = [block.size for block in self.layout.blocks]
        found = []
        for factor, block, part in zip(
            self.factors, self.layout.blocks, v.split(sizes, -1), strict=True
        ):
            if factor is not None:
                inside = block.rows(part) @ factor.columns().square()
                part = inside.view(*part.shape[:2], -1)
            found.append(part)
        return torch.cat(found, -1)

    @property
    def T(self) -> Transposed:  # noqa: N802 (as in torch and numpy)
        """Pᵀ."""
        return Transposed(self)

    def cut(self, runs: slice) -> LinearMap:
        """The same for some of the runs."""
        factors = tuple([f and f.cut(runs) for f in self.factors])
        return LinearMap(self.layout, factors, self.probe[runs], self.sizes, self.rank)

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
        if P.whole:
            return z
        if z.is_meta:
            return z.new_empty(*z.shape[:2], P.layout.size)
        if len(P.factors) == 1:
            return _up(P.factors[0], P.layout.blocks[0], z)
        out = z.new_empty(
            *z.shape[:2], P.layout.size
        )  # filled block by block: no second vector of this length
        places, parts = (
            out.split([block.size for block in P.layout.blocks], -1),
            z.split(list(P.sizes), -1),
        )
        for place, factor, block, part in zip(
            places, P.factors, P.layout.blocks, parts, strict=True
        ):
            _fill(place, factor, block, part)
        return out

    def plus(self, z: Vector, x: Vector, overwrite: bool = False, sign: int = 1) -> Vector:
        """Return x + Pᵀz, or x − Pᵀz, with one new vector of this length; with `overwrite` in x itself."""
        P = self.of
        if overwrite:
            if z.is_meta:
                return x
            parts = (z if sign > 0 else -z).split(list(P.sizes), -1)
            places = x.split([block.size for block in P.layout.blocks], -1)
            for place, factor, block, part in zip(
                places, P.factors, P.layout.blocks, parts, strict=True
            ):
                _fill(place, factor, block, part, add=True)
            return x
        moved = self @ z
        if moved is z or moved.shape[1] < x.shape[1]:
            return x + moved if sign > 0 else x - moved
        return moved.add_(x) if sign > 0 else torch.sub(x, moved, out=moved)

    def put(self, z: Vector, x: Vector) -> Vector:
        """Return x with z in the place of P x: what is outside the subspace stays."""
        return z if self.of.whole else self.plus(z - self.of @ x, x)


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
