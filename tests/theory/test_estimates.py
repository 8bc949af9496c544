"""Estimates of a problem's constants against what is known exactly."""

from __future__ import annotations

import time
from functools import partial

import numpy as np
import pytest
import torch

from fedspan.nn.models import build, mlp
from fedspan.tasks.regression import Regression
from fedspan.theory.estimates import estimate, smoothness, variance
from fedspan.theory.gradient_probe import batch_grads, full_grads
from support.loops import settings, small
from support.networks import network


def exact_smoothness(problem: object) -> np.ndarray:
    """Largest eigenvalue of A_iᵀA_i/n + λ by hand."""
    data = problem.data.double().numpy()[0] / problem.scale[:, None, None]  # type: ignore[attr-defined]
    d = problem.layout.blocks[0].inputs  # type: ignore[attr-defined]
    return (
        np.array([np.linalg.eigvalsh(a[:, :d].T @ a[:, :d] / len(a)).max() for a in data])
        + problem.reg
    )  # type: ignore[attr-defined]


@pytest.mark.parametrize("het", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_smoothness_of_the_toy(het: float, dtype: torch.dtype) -> None:
    problem = Regression(het=het).build((3,), settings(20, dtype))
    known = exact_smoothness(problem)
    each = problem.smoothness()
    np.testing.assert_allclose(each[0], known, rtol=1e-5)
    assert estimate(problem).L.value == pytest.approx(known.max(), rel=1e-5)
    iterated, _ = smoothness(partial(full_grads, problem), problem.x0.expand(-1, 20, -1))
    np.testing.assert_allclose(iterated[0], known, rtol=0.05)  # the generic way, to 5 %


def test_variance_of_the_toy() -> None:
    """Mini-batches are drawn with replacement, so σ² is the spread of single examples over the batch size."""
    problem = small(batch=4)
    d, m = problem.layout.blocks[0].inputs, 2  # type: ignore[attr-defined]
    rows = problem.data.double().numpy()[0] / problem.scale[:, None, None]  # type: ignore[attr-defined]
    single = np.einsum("inm,ind->inmd", -rows[..., d:], rows[..., :d]).reshape(
        7, -1, m * d
    )  # at x = 0
    known = ((single - single.mean(1, keepdims=True)) ** 2).sum(-1).mean(1) / 4
    found, error = variance(batch_grads(problem, problem.x0, 4000))
    np.testing.assert_allclose(found[0], known, rtol=0.1)
    assert error < 0.05


def test_gap_and_control_of_the_toy() -> None:
    problem = small()
    found = estimate(problem)
    best = problem.evaluate(problem.optimum())["loss"][0]  # type: ignore[attr-defined]
    assert found.gap.value == pytest.approx(problem.evaluate(problem.x0)["loss"][0] - best)
    grads = full_grads(problem, problem.x0)
    assert found.control.value == pytest.approx(float(grads.square().sum(-1).mean()))
    assert found.grad_sq.value == pytest.approx(float(grads.mean(1).square().sum()))


def test_smoothness_of_a_network_against_its_hessian() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 10)
    )
    problem = network(model, 2, 32, 32, (6,))
    found = estimate(problem, clients=2, examples=32, iterations=200)
    names = [block.name for block in problem.layout.blocks]
    for place, source in enumerate(problem.client_data):
        inputs, targets = source.take(torch.arange(32))

        def loss(flat: torch.Tensor) -> torch.Tensor:
            parts = problem.layout.split(flat.view(1, 1, -1))
            out = torch.func.functional_call(model, {n: parts[n][0, 0] for n in names}, (inputs,))  # noqa: B023
            return torch.nn.functional.cross_entropy(out, targets)  # noqa: B023

        hessian = torch.func.hessian(loss)(problem.x0.view(-1))
        assert found.L_each[0, place] == pytest.approx(
            float(torch.linalg.matrix_norm(hessian, 2)), rel=0.05
        )


def test_estimates_leave_a_network_as_it_was() -> None:
    torch.manual_seed(0)
    problem = network(mlp((1, 4, 4), 10), 3, 40, 8, (1, 4, 4))
    state, before = torch.random.get_rng_state(), problem.x0.clone()
    first, again = estimate(problem), estimate(problem)
    assert first.L == again.L
    assert first.sigma2 == again.sigma2
    assert torch.equal(problem.x0, before)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.slow
def test_a_resnet_takes_less_than_two_minutes() -> None:
    problem = network(build("resnet20", (3, 32, 32), 100), 10, 256, 32, (3, 32, 32))
    began = time.process_time()
    found = estimate(problem)
    assert time.process_time() - began < 2 * 120  # of two cores, whatever else they do
    assert found.L.value > 0
