"""Gradients of any clients at any point, taken outside a run and without an effect on it.

Two objectives of the same round draw the same mini-batches, so differences of gradients are free of sampling noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fedspan.core.layout import Vector
from fedspan.core.objective import Objective, Problem
from fedspan.core.round import Round
from fedspan.core.seeds import torch_generator

PROBE_ROUND = 1 << 40  # no run gets this far, so a probe never shares mini-batches with a run


@dataclass(frozen=True, eq=False)
class GradientProbe:
    """Some clients of a problem, the same ones in every run of a batch."""

    problem: Problem
    clients: npt.NDArray[np.int64]

    def full_grads(self, x: Vector) -> Vector:
        """∇f_i(x) on all data, (runs, clients, d)."""
        return self._per_client(x, lambda f, y: f.full_grad(y))

    def mean_grads(self, x: Vector, batches: int) -> Vector:
        """∇f_i(x), the mean over a few mini-batches, which are the same at every x."""
        return self._per_client(
            x,
            lambda f, y: (
                sum((f.grad(y) for _ in range(batches)), start=torch.zeros_like(y)) / batches
            ),
        )

    def batch_grads(self, x: Vector, count: int) -> list[Vector]:
        """∇f_i(x; ξ) on each of `count` mini-batches."""
        stacked = self._per_client(x, lambda f, y: torch.cat([f.grad(y) for _ in range(count)], -1))
        return list(stacked.split(x.shape[-1], -1))

    def _per_client(self, x: Vector, gradient: Callable[[Objective, Vector], Vector]) -> Vector:
        runs, n = len(self.problem.seeds), len(self.clients)
        ids = np.broadcast_to(self.clients, (runs, n)).copy()
        never = np.full(ids.shape, -1, np.int64)
        rnd = Round(
            PROBE_ROUND, self.problem.seeds, self.problem.clients, self.problem.layout, ids, never
        )
        wide = x.expand(-1, n, -1)
        with torch_generator():  # layers such as dropout draw from torch's own generator
            if self.problem.cohort_mode == "batched":
                return gradient(self._objective(rnd), wide)
            parts = [
                gradient(self._objective(rnd.subset(np.array([i]))), wide[:, i : i + 1])
                for i in range(n)
            ]
        return torch.cat(parts, 1)

    def _objective(self, rnd: Round) -> Objective:
        f = self.problem.cohort(rnd)
        f.begin(self.problem.buffers0)
        return f


def all_clients(problem: Problem) -> GradientProbe:
    """A probe of all clients."""
    return GradientProbe(problem, np.arange(problem.clients))


def client_weights(problem: Problem) -> torch.Tensor:
    """w_i of all clients, (1, N, 1)."""
    shares = (
        np.full(problem.clients, 1 / problem.clients)
        if problem.weights is None
        else problem.weights
    )
    return torch.from_numpy(shares).view(1, -1, 1)
