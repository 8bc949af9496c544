"""Optimizers as values: local steps along a direction, and how their memory is carried to another subspace.

Everything is elementwise on vectors (runs, clients, n), so that a cohort moves as one. The memory of an optimizer is
one vector too: `size(n)` numbers for n trained ones, zero at the start.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod

import torch

from fedspan.core.bundle import Bundle
from fedspan.core.layout import Layout, Vector
from fedspan.core.linear_map import CoordinateFactor, Factor, LinearMap
from fedspan.core.objective import Direction, InPlaceDirection, SteppingDirection


class Optimizer(ABC):
    """Local steps along a direction."""

    plain: bool = False  # whether a step is y ← y − η direction(y): the mean direction follows from the end point
    decay: float = 0.0  # weight decay, in addition to that of the objective
    moments: str = "reset"  # the memory between a client's rounds: "reset" or "project"
    scaled: bool = False  # whether clients scale steps by D, from the server's state

    @abstractmethod
    def step(self, y: Vector, g: Vector, memory: Vector, lr: float, origin: Vector | None) -> None:
        """One step from y along g. It changes y and the memory in place; the weights that decay are origin + y."""

    @abstractmethod
    def size(self, n: int) -> int:
        """Numbers in the memory for n trained ones."""

    @abstractmethod
    def carry(self, held: Vector, old: LinearMap, new: LinearMap) -> Vector:
        """A memory of steps inside one subspace, as the memory to start with inside another."""

    def init_server(self, x0: Vector, layout: Layout) -> dict[str, Vector]:
        """Return the server's parts before round 0."""
        return {}

    def scales(self, source: Bundle, P: LinearMap) -> Vector | None:
        """Return D inside the subspace, from the server's state or a download; None for D = 1."""
        return None

    def down(self, server: Bundle) -> dict[str, Vector]:
        """Return what clients need of the server."""
        return {}

    def server(self, server: Bundle, w: Vector, P: LinearMap) -> dict[str, Vector]:
        """Return the server's parts after a round with the mean gradient w; only if `scaled`."""
        return {}

    def descend(
        self,
        start: Vector,
        direction: Direction,
        lr: float,
        steps: int,
        origin: Vector | None = None,
        held: Vector | None = None,
        shift: Vector | None = None,
    ) -> tuple[Vector, Vector]:
        """(end point, memory) after `steps` steps from `start`, with `held` as the memory at the start.

        `shift` is added to the point after every step and does not enter the memory.
        """
        if (
            self.plain
            and shift is None
            and isinstance(direction, SteppingDirection)
            and direction.takes_steps
        ):
            end = direction.descend(start, lr, steps)
            return end, end[..., :0]
        place = direction.in_place(start) if isinstance(direction, InPlaceDirection) else None
        with place or contextlib.nullcontext(start) as y:
            for number in range(steps):
                g = direction(y)
                if (
                    number == 0
                ):  # `start` and `held` are the caller's, and a cohort may set out from one point
                    y = start.expand_as(g).clone() if place is None else y
                    memory = (
                        g.new_zeros(*g.shape[:-1], self.size(g.shape[-1]))
                        if held is None
                        else held.clone()
                    )
                self.step(y, g, memory, lr, origin)
                if shift is not None:
                    y.add_(shift)
                if number < steps - 1:
                    del g  # not to be held during the next gradient
            return y if place is None else g.copy_(
                y
            ), memory  # nothing else needs the gradient's memory now


def turned(m: Vector, old: LinearMap, new: LinearMap) -> Vector:
    """P' Pᵀ m: a mean of gradients seen through P, as P' sees it."""
    return new @ (old.T @ m)


def turned_squares(v: Vector, old: LinearMap, new: LinearMap) -> Vector:
    """Means of squared gradients through P as means through P', block by block; blocks sent in full keep theirs.

    Assume that the coordinates of g are uncorrelated. Then E (P'g)² is the elementwise square of P'Pᵀ times E (Pg)²,
    plus what P' sees outside of P. Only the share of the latter is known, so its size is taken to be the mean of its
    row of the weight. For coordinates: those that are still there keep their number, the others get the mean.
    """
    parts = zip(v.split(list(old.sizes), -1), old.factors, new.factors, strict=True)
    return torch.cat([p if f is None or g is None else _squares(p, f, g) for p, f, g in parts], -1)


def _squares(part: Vector, old: Factor, new: Factor) -> Vector:
    rows = part.reshape(
        part.shape[0], -1, old.rank
    )  # a projected weight is out × r, for every client
    ones = torch.ones_like(rows[:, :1])
    if isinstance(old, CoordinateFactor):  # P'Pᵀ is of zeros and ones, which are their own squares
        seen, share = new.down(old.up(rows)), new.down(old.up(ones))
    else:
        squares = new.down(old.columns().mT).square()
        seen, share = rows @ squares, ones @ squares
    return (seen + (1 - share).clamp_min(0) * rows.mean(-1, keepdim=True)).reshape(
        *part.shape[:-1], -1
    )
