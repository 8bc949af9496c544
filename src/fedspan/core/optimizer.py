"""Optimizers as values: how local steps follow a direction, and what of their memory outlives a change of subspace.

Everything is elementwise on vectors (runs, clients, n), so that a cohort moves as one. What an optimizer remembers of a
walk is one vector too, `size(n)` numbers for n that are trained; a walk begins at rest where it is given none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fedspan.core.errors import below_one
from fedspan.core.layout import Vector
from fedspan.core.objective import Direction
from fedspan.core.projector import Factor, LinearMap


class Optimizer(ABC):
    """Local steps along a direction."""

    plain: bool = False  # y ← y − η direction(y) and no more: then the end point tells the mean of the directions
    decay: float = 0.0  # of the weights, beside what the objective may have of it

    @abstractmethod
    def descend(
        self,
        start: Vector,
        direction: Direction,
        lr: float,
        steps: int,
        origin: Vector | None = None,
        held: Vector | None = None,
    ) -> tuple[Vector, Vector]:
        """(end point, memory) of so many steps. The weights that decay are origin + y, and `held` is a memory."""

    @abstractmethod
    def size(self, n: int) -> int:
        """Numbers in the memory of n that are trained."""

    @abstractmethod
    def carry(self, held: Vector, old: LinearMap, new: LinearMap) -> Vector:
        """A memory of steps inside one subspace, as the one to begin with inside another."""


@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """y ← y − η direction(y); with momentum v ← β v + direction(y), y ← y − η v."""

    momentum: float = 0.0  # β

    def __post_init__(self) -> None:
        below_one("momentum", self.momentum)

    @property
    def plain(self) -> bool:  # type: ignore[override]
        """Without momentum."""
        return not self.momentum

    def descend(
        self,
        start: Vector,
        direction: Direction,
        lr: float,
        steps: int,
        origin: Vector | None = None,
        held: Vector | None = None,
    ) -> tuple[Vector, Vector]:
        walk: Callable[[Vector, float, int], Vector] | None = getattr(direction, "walk", None)
        if walk is not None and self.plain:
            return walk(start, lr, steps), start[..., :0]
        y, v = start, held
        for _ in range(steps):
            d = direction(y)
            if self.momentum:
                d = v = d if v is None else torch.add(d, v, alpha=self.momentum)
            y = torch.add(y, d, alpha=-lr)
            del d  # not to be held during the next gradient
        return y, start[..., :0] if v is None else v

    def size(self, n: int) -> int:
        return n if self.momentum else 0

    def carry(self, held: Vector, old: LinearMap, new: LinearMap) -> Vector:
        return turned(held, old, new)


def turned(m: Vector, old: LinearMap, new: LinearMap) -> Vector:
    """P' Pᵀ m: a mean of gradients seen through P, as far as P' sees it."""
    return new @ (old.T @ m)


def turned_squares(v: Vector, old: LinearMap, new: LinearMap) -> Vector:
    """Means of squared gradients through P as means through P', block by block; blocks that go whole keep theirs.

    Take the coordinates of g to be uncorrelated. Then E (P'g)² is (P'Pᵀ)², squared number by number, times E (Pg)²,
    and what P' sees outside of P besides. Nothing is known of that but its share, so it is taken to be as large as the
    mean of its own row of the weight. For coordinates: those that are still there keep their number, the others get
    the mean.
    """
    parts = zip(v.split(list(old.sizes), -1), old.factors, new.factors, strict=True)
    return torch.cat([p if f is None or g is None else _squares(p, f, g) for p, f, g in parts], -1)


def _squares(part: Vector, old: Factor, new: Factor) -> Vector:
    rows = part.reshape(part.shape[0], -1, old.rank)  # a projected weight is out × r, for every client
    ones = torch.ones_like(rows[:, :1])
    if getattr(old, "index", None) is not None:  # coordinates: P'Pᵀ is of zeros and ones, which are their own squares
        seen, share = new.down(old.up(rows)), new.down(old.up(ones))
    else:
        squares = new.down(old.columns().mT).square()
        seen, share = rows @ squares, ones @ squares
    return (seen + (1 - share).clamp_min(0) * rows.mean(-1, keepdim=True)).reshape(*part.shape[:-1], -1)
