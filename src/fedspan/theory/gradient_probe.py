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

        def mean(f: Objective, y: Vector) -> Vector:
            return sum((f.grad(y) for _ in range(batches)), start=torch.zeros_like(y)) / batches

        return self._per_client(x, mean)

    def batch_grads(self, x: Vector, count: int) -> list[Vector]:
        """∇f_i(x; ξ) on each of `count` mini-batches."""
        stacked = self._per_client(x, lambda f, y: torch.cat([f.grad(y) for _ in range(count)], -1))
        return list(stacked.split(x.shape[-1], -1))

    def _per_client(self, x: Vector, gradient: Callable[[Objective, Vector], Vector]) -> Vector:
        problem, n = self.problem, len(self.clients)
        ids = np.tile(self.clients, (len(problem.seeds), 1))
        never = np.full(ids.shape, -1, np.int64)
        rnd = Round(PROBE_ROUND, problem.seeds, problem.clients, problem.layout, ids, never)
        wide, found = x.expand(-1, n, -1), []
        with torch_generator():  # layers such as dropout draw from torch's own generator
            for part in computed_together(problem, n):
                f = problem.cohort(rnd.subset(np.arange(n)[part]))
                f.begin(problem.buffers0)
                found.append(gradient(f, wide[:, part]))
        return torch.cat(found, 1)


def computed_together(problem: Problem, n: int) -> list[slice]:
    """The parts of a cohort of n clients that are one batched computation: all of it, or each client."""
    if problem.cohort_mode == "batched":
        return [slice(None)]
    return [slice(i, i + 1) for i in range(n)]


def all_clients(problem: Problem) -> GradientProbe:
    """A probe of all clients."""
    return GradientProbe(problem, np.arange(problem.clients))


def client_weights(problem: Problem) -> torch.Tensor:
    """w_i of all clients, (1, N, 1)."""
    shares = problem.weights
    if shares is None:
        shares = np.full(problem.clients, 1 / problem.clients)
    return torch.from_numpy(shares).view(1, -1, 1)
