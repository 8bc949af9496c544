"""What a user does not know of a problem: L, σ², Δ_F and C_0, each with a word on how far to trust it.

L by power iteration on Hessian-vector products, which are differences of gradients and so work for every Problem:
H v ≈ (∇f(x + hv) − ∇f(x − hv)) / 2h. Where the task knows its Hessians (regression) L is exact. σ² is the spread of
repeated mini-batch gradients. Networks are asked at x⁰, on a sample of clients and examples.
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
from fedspan.theory.gradient_probe import GradientProbe, everyone
from fedspan.theory.setting import Setting

Floats = npt.NDArray[np.float64]
SETTLED = 0.005  # relative change of an eigenvalue between two iterations at which it is taken to have settled


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is looked at. `clients` and `examples` count only where clients are worked through one by one."""

    clients: int = 4
    examples: int = 64  # of each client, for L
    draws: int = 8  # mini-batches of each client, for σ²
    iterations: int = 20  # of the power method


@dataclass(frozen=True)
class Estimate:
    """A number and how sure it is."""

    value: float
    note: str


@dataclass(frozen=True)
class Estimates:
    """The constants of a problem at x⁰ with all controls at zero."""

    L: Estimate  # max_i L_i
    L_mean: Estimate  # of F itself
    L_each: Floats  # of the clients that were asked
    sigma2: Estimate
    gap: Estimate  # Δ_F
    control: Estimate  # C_0
    grad_sq: Estimate  # ‖∇F(x⁰)‖²

    def setting(self, rho: float, clients: int, local_steps: int, rounds: int) -> Setting:
        """As the theorem wants them."""
        return Setting(
            L=self.L.value, sigma2=self.sigma2.value, gap=self.gap.value, control=self.control.value,
            rho=rho, clients=clients, local_steps=local_steps, rounds=rounds,
        )  # fmt: skip


def estimate(problem: Problem, effort: Effort | None = None) -> Estimates:
    """All constants of a problem; of several runs the worst."""
    effort = effort or Effort()
    whole = problem.cohort_mode == "batched"
    asked = everyone(problem) if whole else _sample(problem, effort.clients)
    who = (
        "all clients" if len(asked.clients) == problem.clients else f"{len(asked.clients)} of {problem.clients} clients"
    )
    each, mean, how = _smoothness(problem, asked, effort)
    draws = asked.draws(problem.x0, 8 * effort.draws if whole else effort.draws)
    sigma2, error = variance(draws)
    grads = asked.full(problem.x0) if whole else torch.stack(draws).mean(0)
    size = f"{len(draws)} mini-batches of {who}"
    exact = f"all data of {who}" if whole else size
    bias = 0.0 if whole else float(sigma2.mean()) / len(draws)  # what the noise adds to the norm of a mean
    control = max(0.0, float(grads.double().square().sum(-1).mean()) - bias)
    mean_grad = grads.double().mean(1).square().sum(-1).max()
    return Estimates(
        L=Estimate(float(each.max()), how),
        L_mean=Estimate(float(mean.max()), how),
        L_each=each,
        sigma2=Estimate(float(sigma2.max()), f"± {100 * error:.0f} %, the noisiest client; {size}, at x⁰"),
        gap=_gap(problem),
        control=Estimate(control, f"controls at zero: mean ‖∇f_i(x⁰)‖²; {exact}"),
        grad_sq=Estimate(float(mean_grad), exact),
    )


@dataclass(frozen=True, eq=False)
class Top:
    """‖H_i‖ as far as the power method has come."""

    values: Floats  # (runs, n)
    change: float  # relative, in the last iteration; the largest of all
    iterations: int
    directions: Vector  # (runs, n, d)


def smoothness(grad: Callable[[Vector], Vector], x: Vector, iterations: int = 25, start: Vector | None = None) -> Top:
    """‖H_i‖ of the Hessians behind `grad` at every row of x, (runs, n, d), from `start` or a random direction.

    ‖H v‖ for a unit v is never more than ‖H‖, so what the power method gives is a lower bound that rises.
    """
    step = (1e-3 * x.norm(dim=-1, keepdim=True)).clamp_min(1e-2)
    if start is None:
        key = np.array([seeds.key(0, "power iteration")], np.uint64)
        start = torch.from_numpy(seeds.normal(key, x.shape[-1])[0]).to(x.dtype)
    v, found, change, done = start.expand_as(x), torch.zeros(()), math.inf, 0
    while done < iterations and change >= SETTLED:
        v = v / v.norm(dim=-1, keepdim=True).clamp_min(1e-30)
        v = (grad(x + step * v) - grad(x - step * v)) / (2 * step)
        before, found = found, v.norm(dim=-1)
        change = float(((found - before).abs() / found.clamp_min(1e-30)).max())
        done += 1
    return Top(found.double().numpy(), change, done, v)


def variance(draws: list[Vector]) -> tuple[Floats, float]:
    """E‖g_i − ∇f_i‖² of each client, (runs, n), from repeated mini-batches; and the relative standard error."""
    stacked = torch.stack(draws).double()
    off = (stacked - stacked.mean(0)).square().sum(-1) * (len(draws) / (len(draws) - 1))
    found = off.mean(0)
    error = off.std(0) / math.sqrt(len(draws)) / found.clamp_min(1e-300)
    return found.numpy(), float(error.mean())


def _smoothness(problem: Problem, asked: GradientProbe, effort: Effort) -> tuple[Floats, Floats, str]:
    known = problem.smoothness()
    if known is not None:
        return *known, "exact: the Hessians are known"
    size = getattr(problem, "batch", effort.examples)
    batches = max(1, round(effort.examples / size))
    x = problem.x0.expand(-1, len(asked.clients), -1)
    top = smoothness(lambda y: asked.some(y, batches), x, effort.iterations)
    near = top.directions.mean(1, keepdim=True)  # where the clients' Hessians are largest that of F is not small
    mean = smoothness(lambda y: asked.some(y, batches).mean(1, keepdim=True), problem.x0, effort.iterations // 3, near)
    note = (
        f"power iteration, {top.iterations} steps, last change {100 * top.change:.1f} %; {batches * size} examples of "
        f"{len(asked.clients)} clients; at x⁰ only: it changes in training"
    )
    return top.values, mean.values[:, 0], note


def _gap(problem: Problem) -> Estimate:
    found = problem.evaluate(problem.x0, problem.buffers0)
    if "loss" not in found:
        return Estimate(0.0, "unknown: the problem has no loss to evaluate")
    best = problem.lowest()
    if best is None:
        return Estimate(float(found["loss"].max()), "an upper bound: loss of x⁰ on the test set, F* taken as 0")
    return Estimate(float((found["loss"] - best).max()), "exact: F* is known")


def _sample(problem: Problem, count: int) -> GradientProbe:
    key = np.array([seeds.key(problem.seeds[0], "estimates")], np.uint64)
    return GradientProbe(problem, seeds.choose(key, problem.clients, min(count, problem.clients))[0])
