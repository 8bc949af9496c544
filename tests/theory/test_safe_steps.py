"""The corollary's steps on random problems: never a divergence, and the bounds hold for the mean ‖∇F‖² of a run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from fedspan.drifts import Controls
from fedspan.methods.ssf import SSF
from fedspan.projectors.gaussian import Gaussian
from fedspan.servers import Mean
from fedspan.tasks.regression import RegressionProblem
from fedspan.theory import corollary, theorem
from fedspan.theory.diagnosis import safe_steps, setting_of
from fedspan.theory.estimates import estimate
from fedspan.theory.gradient_probe import full_grads
from support.loops import model, settings, start


@dataclass(frozen=True)
class Case:
    """One random problem: het 0 to 5, ρ 0.01 to 1, N 2 to 50, K 1 to 20, condition numbers to 1e4."""

    problem: RegressionProblem
    rank: int
    local_steps: int
    rounds: int


def case(number: int) -> Case:
    rng = np.random.default_rng(number)
    d, clients, n = int(rng.integers(10, 101)), int(rng.integers(2, 51)), int(rng.integers(4, 20))
    rho = np.exp(rng.uniform(np.log(0.01), 0))
    shape = 10 ** (
        -0.5 * rng.uniform(0, 4) * np.linspace(0, 1, d)
    )  # Hessians with condition numbers up to 1e4
    het, target_het = rng.uniform(0, 5), rng.choice([0.0, 1.0, 3.0])
    a = (rng.normal(size=(clients, n, d)) + het * rng.normal(size=(clients, 1, d))) * shape
    target = rng.normal(size=(d, 1)) + target_het * rng.normal(size=(clients, d, 1))
    b = a @ target + rng.choice([0.0, 0.1, 1.0]) * rng.normal(size=(clients, n, 1))
    batch = "full" if rng.random() < 0.2 else int(rng.integers(1, 5))
    scale = 10 ** rng.uniform(-2, 2)  # the units of the loss
    data = [(scale * a, scale * b, np.full(clients, n))] * 3
    problem = RegressionProblem(data, (0, 1, 2), 1e-4 * scale**2, settings(batch))
    rounds = int(np.exp(rng.uniform(np.log(30), np.log(300))))
    return Case(problem, max(1, round(rho * d)), int(rng.integers(1, 21)), rounds)


def check(number: int, part: float = 1.0) -> None:
    """`part` is the share of clients that take part in a round."""
    one = case(number)
    problem = one.problem
    cohort = max(1, round(part * problem.clients))
    draft = SSF(
        lr=1.0, local_steps=one.local_steps, space=Gaussian(rank=one.rank), drift=Controls()
    )
    setting = setting_of(estimate(problem), draft, problem, cohort, one.rounds)
    steps = safe_steps(setting)
    server = Mean(lr=steps.server(one.local_steps))
    method = dataclasses.replace(draft, lr=steps.local, server=server)
    loop = start(method, problem, cohort)
    squares = []
    first = problem.evaluate(problem.x0)["loss"]
    with torch.inference_mode():
        for _ in range(one.rounds):
            grads = full_grads(problem, model(loop))
            squares.append(float(grads.mean(1).square().sum(-1).mean()))
            loop.step()
    last = problem.evaluate(model(loop))["loss"]
    assert np.isfinite(squares).all()
    assert last.mean() <= first.mean() * (1 + 1e-3), "diverged"
    assert max(squares) <= 4 * squares[0], "diverged on the way"
    if cohort < problem.clients:
        return  # the bounds are those of all clients
    assert vars(steps) == pytest.approx(vars(corollary.steps(setting)), rel=1e-12)
    assert np.mean(squares) <= corollary.bound(setting)
    assert np.mean(squares) <= theorem.bound_proved(setting, steps)


@pytest.mark.parametrize("number", range(8))
def test_safe_steps_on_a_few_random_problems(number: int) -> None:
    check(number)


@pytest.mark.parametrize("number", range(4))
def test_safe_steps_with_a_quarter_of_the_clients_per_round(number: int) -> None:
    check(number, 0.25)


@pytest.mark.slow
def test_safe_steps_on_two_hundred_random_problems() -> None:
    for number in range(200):
        check(number)
