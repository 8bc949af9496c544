"""Gradients of any clients at any point, taken outside a run and without an effect on it.

Two objectives of the same round draw the same mini-batches, so differences of gradients are free of sampling noise.
`clients` are those whose gradients are wanted, the same in every run of a batch; by default all.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from fedspan.core.layout import Vector
from fedspan.core.objective import Objective, Problem
from fedspan.core.round import Round
from fedspan.core.seeds import torch_generator

Clients = npt.NDArray[np.int64] | None
PROBE_ROUND = 1 << 40  # no run gets this far, so a probe never shares mini-batches with a run


def full_grads(problem: Problem, x: Vector, clients: Clients = None) -> Vector:
    """∇f_i(x) on all data, (runs, clients, d)."""
    return _each(problem, x, clients, lambda f, y: f.full_grad(y))


def mean_grads(problem: Problem, x: Vector, batches: int, clients: Clients = None) -> Vector:
    """∇f_i(x), the mean over a few mini-batches, which are the same at every x."""

    def mean(f: Objective, y: Vector) -> Vector:
        return sum((f.grad(y) for _ in range(batches)), start=torch.zeros_like(y)) / batches

    return _each(problem, x, clients, mean)


def batch_grads(problem: Problem, x: Vector, count: int, clients: Clients = None) -> list[Vector]:
    """∇f_i(x; ξ) on each of `count` mini-batches."""

    def side_by_side(f: Objective, y: Vector) -> Vector:
        return torch.cat([f.grad(y) for _ in range(count)], -1)

    return list(_each(problem, x, clients, side_by_side).split(x.shape[-1], -1))


def _each(
    problem: Problem, x: Vector, clients: Clients, gradient: Callable[[Objective, Vector], Vector]
) -> Vector:
    ids = np.tile(
        np.arange(problem.clients) if clients is None else clients, (len(problem.seeds), 1)
    )
    n, never = ids.shape[1], np.full(ids.shape, -1, np.int64)
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


def client_weights(problem: Problem) -> torch.Tensor:
    """w_i of all clients, (1, N, 1)."""
    shares = problem.weights
    if shares is None:
        shares = np.full(problem.clients, 1 / problem.clients)
    return torch.from_numpy(shares).view(1, -1, 1)
