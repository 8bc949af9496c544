"""P as something that can be applied, never as a d × d array, and never as one r × d array for a whole model.

A `Factor` is the projector of one block: a weight W (out × in) becomes W Pᵀ (out × r). A `LinearMap` puts the factors
of all blocks together: `P @ v` goes from d numbers to r, `P.T @ z` back.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from fedspan.core.errors import ProtocolError
from fedspan.core.layout import Block, Layout, Vector

PROBE_TOLERANCE = 1e-9  # far above rounding between machines (1e-12), far below any real difference


class Factor(Protocol):
    """The projector of one block: r orthonormal rows over its d inputs, applied to the last axis."""

    @property
    def rank(self) -> int:
        """r."""

    def down(self, v: torch.Tensor) -> torch.Tensor:
        """v Pᵀ: (runs, n, d) → (runs, n, r)."""

    def up(self, z: torch.Tensor) -> torch.Tensor:
        """z P: (runs, n, r) → (runs, n, d)."""

    def columns(self) -> torch.Tensor:
        """Pᵀ itself, (runs, d, r), for tasks that multiply their data by it."""

    def probe(self) -> torch.Tensor:
        """One float64 number a run that tells this P from another; shape (runs, 1, 1)."""

    def cut(self, runs: slice) -> Factor:
        """The same of some of the runs."""

    def to(self, device: torch.device) -> Factor:
        """The same on another device."""


@runtime_checkable
class CoordinateFactor(Factor, Protocol):
    """A factor that picks r of the d inputs: applying it is a gather, without a product."""

    @property
    def index(self) -> torch.Tensor:
        """Which inputs, (runs, 1, r)."""


def picked(factor: Factor | None) -> torch.Tensor | None:
    """The inputs that a factor picks; None where it is not a choice of coordinates."""
    return factor.index if isinstance(factor, CoordinateFactor) else None


@dataclass(frozen=True, eq=False)
class LinearMap:
    """P_t over a whole layout: one factor a projected block, None where a block goes whole."""

    layout: Layout
    factors: tuple[Factor | None, ...]
    probe: torch.Tensor  # one number a run, (runs, 1, 1) in float64; travels with each download

    def __matmul__(self, v: Vector) -> Vector:
        """P v."""
        if len(self.factors) == 1:
            return _down(self.factors[0], self.layout.blocks[0], v)
        sizes = [block.size for block in self.layout.blocks]
        parts = zip(self.factors, self.layout.blocks, v.split(sizes, -1), strict=True)
        return torch.cat([_down(f, b, part) for f, b, part in parts], -1)

    @property
    def T(self) -> Transposed:  # noqa: N802 (the letter of the algebra)
        """Pᵀ."""
        return Transposed(self)

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Numbers each block has inside the subspace."""
        pairs = zip(self.factors, self.layout.blocks, strict=True)
        return tuple(b.size if f is None else f.rank * (b.size // b.inputs) for f, b in pairs)

    @functools.cached_property
    def rank(self) -> int:
        """Numbers that travel instead of d."""
        return sum(self.sizes)

    def cut(self, runs: slice) -> LinearMap:
        """The same of some of the runs."""
        return LinearMap(self.layout, tuple(f and f.cut(runs) for f in self.factors), self.probe[runs])

    def agree(self, probe: torch.Tensor) -> None:
        """Raise unless the other end drew the same P."""
        if probe is self.probe:
            return
        if not torch.allclose(probe, self.probe, rtol=PROBE_TOLERANCE, atol=PROBE_TOLERANCE):
            raise ProtocolError(
                f"this end drew another projector (probe {self.probe.flatten().tolist()}) than the server "
                f"(probe {probe.flatten().tolist()}); give both ends the same seed, projector and fedspan version"
            )


@dataclass(frozen=True, eq=False)
class Transposed:
    """Pᵀ of a LinearMap."""

    of: LinearMap

    def __matmul__(self, z: Vector) -> Vector:
        """Pᵀ z."""
        P = self.of
        if len(P.factors) == 1:
            return _up(P.factors[0], P.layout.blocks[0], z)
        out = z.new_empty(*z.shape[:2], P.layout.size)  # filled block by block: no second vector of this length
        places, parts = out.split([block.size for block in P.layout.blocks], -1), z.split(list(P.sizes), -1)
        for place, factor, block, part in zip(places, P.factors, P.layout.blocks, parts, strict=True):
            place.copy_(_up(factor, block, part))
        return out


def _down(factor: Factor | None, block: Block, v: Vector) -> Vector:
    if factor is None:
        return v
    runs, clients, _ = v.shape
    return factor.down(block.matrix(v).flatten(1, 2)).view(runs, clients, -1)


def _up(factor: Factor | None, block: Block, z: Vector) -> Vector:
    if factor is None:
        return z
    runs, clients, _ = z.shape
    v = factor.up(z.reshape(runs, -1, factor.rank))
    return block.vector(v.unflatten(1, (clients, -1)))
