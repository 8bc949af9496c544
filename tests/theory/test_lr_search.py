"""The learning-rate search: its budget, its measure, and runs where it must not change anything."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

import fedspan
from fedspan.api.step_size import budget_of, search
from fedspan.core.config import Search
from fedspan.core.errors import SpecError
from fedspan.nn.models import mlp
from support.loops import advance, model, small, start
from support.methods import build
from support.networks import network


def learnable(**settings: Any) -> Any:
    """A small network on classes that can be told apart, without a test set."""
    torch.manual_seed(0)
    return network(mlp((1, 4, 4), 10), 4, 60, 10, (1, 4, 4), apart=2.0, **settings)


@pytest.mark.parametrize(
    ("rounds", "share", "budget"),
    [(1000, 0.15, 150), (270, 0.15, 40), (100, 0.15, 40), (20, 0.15, 40), (20, 1.0, 40)],
)
def test_a_search_may_always_use_forty_rounds(rounds: int, share: float, budget: int) -> None:
    assert budget_of(Search(share=share), rounds) == budget


def test_a_search_of_very_few_rounds_is_eight_times_as_long() -> None:
    assert [budget_of(Search(), rounds) for rounds in (1, 2, 5, 6)] == [8, 16, 40, 40]


@pytest.mark.parametrize("rounds", [1, 2, 5, 20, 50])
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "ssf", "fedadam"])
def test_short_runs_of_a_network_without_a_test_set(name: str, rounds: int) -> None:
    problem, extra = learnable(), {"rank": 0.5} if name == "ssf" else {}
    method: Any = build(name, **extra)
    before = float(problem.training_loss(problem.x0)[0])
    found = search(method, problem, 4, rounds)
    assert found.metric == "training loss"
    assert found.rounds <= budget_of(Search(), rounds)
    assert max(trial.rounds for trial in found.trials) <= rounds
    cost = f"{len(found.trials)} trials, {found.rounds} rounds, {found.bytes / 1e6:.3g} MB"
    assert found.cost == cost
    assert found.bytes > 0
    loop = advance(start(dataclasses.replace(method, lr=found.lr), problem, 4), rounds)
    after = float(problem.training_loss(model(loop))[0])
    assert after < before
    if rounds >= 20 and name != "fedadam":
        assert after < 0.5 * before


def test_the_test_set_does_not_choose_the_step() -> None:
    """Two runs that differ in their test set alone find the same step; validation data may choose it."""
    torch.manual_seed(0)
    means = 2 * torch.randn(3, 1, 4, 4)
    x, y = torch.randn(120, 1, 4, 4), torch.randint(0, 3, (120,))
    x = x + means[y]
    clients = [(x[i::4], y[i::4]) for i in range(3)]
    held = {"right": (x[3::4], y[3::4]), "wrong": (x[3::4], (y[3::4] + 1) % 3)}
    options: Any = {"method": {"name": "fedavg", "local_steps": 3}, "rounds": 10, "batch_size": 10}

    def found(**data: Any) -> Any:
        torch.manual_seed(1)
        return fedspan.fit(mlp((1, 4, 4), 3), clients, **options, **data).lr_search

    right, wrong = (found(test=data) for data in held.values())
    assert right == wrong == found()
    assert right["metric"] == "training loss"
    assert (
        right["cost"]
        == f"{len(right['trials'])} trials, {right['rounds']} rounds, {right['bytes'] / 1e6:.3g} MB"
    )
    assert found(validation=held["right"])["metric"] == "validation_loss"


@pytest.mark.parametrize("rounds", [3, 20, 50])
def test_short_runs_of_the_toy(rounds: int) -> None:
    problem = small()
    found = search(build("scaffold"), problem, 7, rounds)
    assert found.rounds <= 40
    loop = advance(start(build("scaffold", lr=found.lr), problem, 7), rounds)
    before, after = (float(problem.evaluate(x)["rel_err"][0]) for x in (problem.x0, model(loop)))
    assert after < 0.9 * before


def test_the_training_loss_is_that_of_the_clients() -> None:
    """With all examples in the sample it is the mean of the clients' losses, by their weights."""
    problem, by_examples = (learnable(weights=kind) for kind in ("uniform", "examples"))
    with torch.inference_mode():
        losses = [
            float(problem.loss(problem.model, source.take(torch.arange(60))))
            for source in problem.client_data
        ]
    assert problem.training_loss(problem.x0)[0] == pytest.approx(np.mean(losses), rel=1e-5)
    by_examples.weights = np.array([0.7, 0.1, 0.1, 0.1])
    expected = np.average(losses, weights=by_examples.weights)
    assert by_examples.training_loss(by_examples.x0)[0] == pytest.approx(expected, rel=1e-5)


def test_the_training_loss_of_a_large_problem_is_a_fixed_sample() -> None:
    problem = network(mlp((1, 4, 4), 10), 30, 100, 32, (1, 4, 4))
    seen: list[int] = []
    problem.loss = lambda m, batch: seen.append(len(batch[0])) or m(batch[0]).square().mean()
    first = problem.training_loss(problem.x0)
    assert seen == [32] * 20  # 64 examples of 10 clients
    assert problem.training_loss(problem.x0) == first


def test_a_search_leaves_the_run_as_it_was() -> None:
    fresh, searched = learnable(), learnable()
    state = torch.random.get_rng_state()
    first, again = (search(build("scaffold"), searched, 2, 30) for _ in range(2))
    assert first == again
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(
        *(model(advance(start(build("scaffold"), problem, 2), 3)) for problem in (fresh, searched))
    )


def test_a_loss_may_begin_below_zero() -> None:
    """Densities have likelihoods above 1."""
    problem = learnable()
    above = search(build("fedavg"), problem, 4, 50)
    inner = problem.loss
    problem.loss = lambda m, batch: inner(m, batch) - 10
    below = search(build("fedavg"), problem, 4, 50)
    assert 0.1 <= below.lr / above.lr <= 10


def test_a_problem_without_any_measure_is_refused() -> None:
    problem = small()
    problem.evaluate = lambda *_: {}  # type: ignore[method-assign]
    with pytest.raises(
        SpecError, match=r"needs an error or a loss to measure; give `method.lr` a number"
    ):
        search(build("fedavg"), problem, 7, 100)


def test_the_placeholder_of_a_method_is_not_used() -> None:
    one, other = (search(build("scaffold", lr=lr), small(), 7, 300) for lr in (0.02, 7.0))
    assert one == other


def test_by_a_loss_the_rate_keeps_away_from_those_that_diverge() -> None:
    """A few rounds do not show that a rate near the edge becomes unstable later."""
    for name in ("fedavg", "scaffold", "ssf"):
        method = build(name, **({"rank": 0.5} if name == "ssf" else {}))
        found = search(method, learnable(), 4, 50, Search(start=8.0))
        edge = min((trial.lr for trial in found.trials if trial.diverged), default=math.inf)
        assert found.lr <= edge / 3
        fast = [trial for trial in found.trials if trial.rounds == 2 and not trial.diverged]
        best = max(fast, key=lambda trial: trial.fall())
        if best.lr > edge / 3:
            break
    else:
        pytest.fail("no method was fastest near the edge: nothing is shown")
