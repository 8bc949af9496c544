"""Gradients outside a run: of any clients, at any point, on mini-batches or on all of their data.

A fresh objective of the same round draws the same mini-batches, which is what a difference of two gradients needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fedspan.core.layout import Vector
from fedspan.core.method import Round
from fedspan.core.objective import Objective, Problem

APART = 1 << 40  # a round no run reaches, so that what is asked here uses mini-batches of its own


@dataclass(frozen=True, eq=False)
class GradientProbe:
    """Some clients of a problem, the same in every run."""

    problem: Problem
    clients: npt.NDArray[np.int64]

    def round(self, t: int = APART) -> Round:
        """A round of these clients alone."""
        ids = np.broadcast_to(self.clients, (len(self.problem.seeds), len(self.clients)))
        last_round = np.full(ids.shape, -1, np.int64)
        return Round(t, self.problem.seeds, self.problem.clients, self.problem.layout, ids.copy(), last_round)

    def each(self, x: Vector, find: Callable[[Objective, Vector], Vector], t: int = APART) -> Vector:
        """`find(f_i, x_i)` of every client, (runs, clients, d); client by client where the problem goes so."""
        rnd = self.round(t)
        wide = x.expand(-1, len(self.clients), -1)
        with torch.random.fork_rng(devices=[]):  # layers such as dropout draw from the run's own generator
            if self.problem.cohort_mode == "batched":
                return find(self._objective(rnd), wide)
            ones = range(len(self.clients))
            parts = [find(self._objective(rnd.subset(np.array([i]))), wide[:, i : i + 1]) for i in ones]
        return torch.cat(parts, 1)

    def full(self, x: Vector) -> Vector:
        """∇f_i(x) on all data."""
        return self.each(x, lambda f, y: f.full_grad(y))

    def some(self, x: Vector, batches: int, t: int = APART) -> Vector:
        """∇f_i(x) on the mean of a few mini-batches, the same ones at every x."""
        return self.each(
            x, lambda f, y: sum((f.grad(y) for _ in range(batches)), start=torch.zeros_like(y)) / batches, t
        )

    def draws(self, x: Vector, count: int) -> list[Vector]:
        """∇f_i(x; ξ) on `count` mini-batches."""
        stacked = self.each(x, lambda f, y: torch.cat([f.grad(y) for _ in range(count)], -1))
        return list(stacked.split(x.shape[-1], -1))

    def _objective(self, rnd: Round) -> Objective:
        f = self.problem.cohort(rnd)
        f.begin(self.problem.buffers0)
        return f


def everyone(problem: Problem) -> GradientProbe:
    """All clients."""
    return GradientProbe(problem, np.arange(problem.clients))


def weights(problem: Problem) -> torch.Tensor:
    """w_i of all clients, (1, N, 1)."""
    share = np.full(problem.clients, 1 / problem.clients) if problem.weights is None else problem.weights
    return torch.from_numpy(share).view(1, -1, 1)
