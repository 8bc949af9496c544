"""Estimates of a problem's constants L, σ², Δ_F and C_0, each with a note on how reliable it is.

L comes from power iteration on Hessian-vector products. These are differences of gradients, so they work for every
Problem: H v ≈ (∇f(x + hv) − ∇f(x − hv)) / 2h. Where the task knows its Hessians (regression) L is exact. σ² is the
variance of repeated mini-batch gradients. Networks are probed at x⁰, on a sample of clients and examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fedspan.core import seeds
from fedspan.core.layout import Vector
from fedspan.core.objective import Problem
from fedspan.theory.gradient_probe import batch_grads, full_grads, mean_grads

Floats = npt.NDArray[np.float64]
DRAWS = 8  # mini-batches of each client for σ², and 8 times as many of batched ones
CONVERGED = 0.005  # relative change of the eigenvalue at which power iteration stops


@dataclass(frozen=True)
class Estimate:
    """A number and how reliable it is."""

    value: float
    note: str


@dataclass(frozen=True)
class Estimates:
    """The constants of a problem at x⁰ with all controls at zero."""

    L: Estimate  # max_i L_i
    L_each: Floats  # (runs, n), of the sampled clients
    sigma2: Estimate
    gap: Estimate  # Δ_F
    control: Estimate  # C_0
    grad_sq: Estimate  # ‖∇F(x⁰)‖²


def estimate(
    problem: Problem, clients: int = 4, examples: int = 64, iterations: int = 20
) -> Estimates:
    """All constants of a problem; the worst of several runs.

    Args:
        problem: The problem.
        clients: How many are sampled where they are computed one by one.
        examples: Of each client, for L, also there only.
        iterations: Of power iteration.
    """
    whole = problem.cohort_mode == "batched"
    count = problem.clients if whole else min(clients, problem.clients)
    key = np.array([seeds.key(problem.seeds[0], "estimates")], np.uint64)
    chosen = seeds.choose(key, problem.clients, count)[0]
    who = "all clients" if count == problem.clients else f"{count} of {problem.clients} clients"
    each, how = _smoothness(problem, chosen, examples, iterations)
    draws = batch_grads(problem, problem.x0, 8 * DRAWS if whole else DRAWS, chosen)
    sigma2, error = variance(draws)
    grads, bias = torch.stack(draws).mean(0), float(sigma2.mean()) / len(draws)
    size = exact = f"{len(draws)} mini-batches of {who}"
    if whole:
        grads, bias, exact = full_grads(problem, problem.x0), 0.0, f"all data of {who}"
    grads = grads.double()
    control = float(grads.square().sum(-1).mean()) - bias  # noise adds it to the square of a mean
    noisiest = f"± {100 * error:.0f} %, the noisiest client; {size}, at x⁰"
    return Estimates(
        L=Estimate(float(each.max()), how),
        L_each=each,
        sigma2=Estimate(float(sigma2.max()), noisiest),
        gap=_gap(problem),
        control=Estimate(max(0.0, control), f"controls at zero: mean ‖∇f_i(x⁰)‖²; {exact}"),
        grad_sq=Estimate(float(grads.mean(1).square().sum(-1).max()), exact),
    )


def smoothness(
    grad: Callable[[Vector], Vector], x: Vector, iterations: int = 25
) -> tuple[Floats, str]:
    """‖H_i‖ of the Hessians of `grad` at every row of x, (runs, n, d), and how it was found.

    ‖H v‖ ≤ ‖H‖ for every unit v, so the result of the power iteration is a lower bound that rises with its steps.
    """
    step = (1e-3 * x.norm(dim=-1, keepdim=True)).clamp_min(1e-2)
    key = np.array([seeds.key(0, "power iteration")], np.uint64)
    v = torch.from_numpy(seeds.normal(key, x.shape[-1])[0]).to(x.dtype).expand_as(x)
    found, change, done = torch.zeros(()), math.inf, 0
    while done < iterations and change >= CONVERGED:
        v = v / v.norm(dim=-1, keepdim=True).clamp_min(1e-30)
        v = (grad(x + step * v) - grad(x - step * v)) / (2 * step)
        before, found = found, v.norm(dim=-1)
        change = float(((found - before).abs() / found.clamp_min(1e-30)).max())
        done += 1
    how = f"power iteration, {done} steps, last change {100 * change:.1f} %"
    return found.double().numpy(), how


def variance(draws: list[Vector]) -> tuple[Floats, float]:
    """E‖g_i − ∇f_i‖² per client, (runs, n), from repeated mini-batches, and its relative standard error."""
    stacked = torch.stack(draws).double()
    off = (stacked - stacked.mean(0)).square().sum(-1) * (len(draws) / (len(draws) - 1))
    found = off.mean(0)
    error = off.std(0) / math.sqrt(len(draws)) / found.clamp_min(1e-300)
    return found.numpy(), float(error.mean())


def _smoothness(
    problem: Problem, clients: npt.NDArray[np.int64], examples: int, iterations: int
) -> tuple[Floats, str]:
    known = problem.smoothness()
    if known is not None:
        return known, "exact: the Hessians are known"
    size, n = getattr(problem, "batch", examples), len(clients)
    batches = max(1, round(examples / size))
    x = problem.x0.expand(-1, n, -1)
    each, how = smoothness(lambda y: mean_grads(problem, y, batches, clients), x, iterations)
    data = f"{batches * size} examples of {n} clients"
    return each, f"{how}; {data}; at x⁰ only, L changes during training"


def _gap(problem: Problem) -> Estimate:
    start = problem.x0, problem.buffers0
    known, where = problem.evaluate(*start).get("loss"), "on the test set"
    if known is None:
        known, where = problem.training_loss(*start), "on a sample of the training data"
    if known is None:
        return Estimate(0.0, "unknown: the problem reports no loss")
    best = problem.lowest()
    if best is None:
        return Estimate(float(known.max()), f"upper bound: loss of x⁰ {where}, with F* = 0")
    return Estimate(float((known - best).max()), "exact: F* is known")
