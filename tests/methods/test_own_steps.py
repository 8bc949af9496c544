"""Clients that take different numbers of local steps: the box in NumPy, laws, rates, and the runtimes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from fedspan.core.errors import SpecError
from fedspan.engine.simulator import Simulator
from support.channel import remote
from support.loops import Scripted, advance, close, model, small, start
from support.methods import build
from support.reference import compare, projected

STEPS = (1, 7, 3, 20, 2, 5, 11)  # K_i
CORRECTED = {"correction": "always"}


@pytest.mark.parametrize("batch", ["full", 4])
@pytest.mark.parametrize("weights", ["uniform", "examples"])
@pytest.mark.parametrize(
    "spec",
    [
        {"name": "fednova", "server_lr": 0.7},
        {"name": "fedavg", "normalize": False},
        {"name": "fedprox", "mu": 0.5},
        {"name": "fedavgm", "server_momentum": 0.9},
        {"name": "scaffold"},
        projected("subavg", "gaussian"),
        projected("ssf", "gaussian", refresh=3, server_lr=0.7, **CORRECTED),
        projected("ssf", "hadamard", control="paper", **CORRECTED),
    ],
    ids=lambda spec: "-".join(str(v) for v in spec.values() if isinstance(v, str)),
)
def test_the_box_in_numpy(
    tmp_path: Path,
    spec: dict[str, Any],
    weights: Literal["uniform", "examples"],
    batch: int | Literal["full"],
) -> None:
    compare(tmp_path, spec, weights, batch, unequal=True, steps=STEPS)


KINDS = [
    ("fedavg", {"normalize": False}),
    ("fednova", {"server_lr": 0.7, "momentum": 0.5}),
    ("fedadam", {"optimizer": {"name": "adamw", "eps": 1e-3}}),
    ("scaffold", {"correction": "tested", "server_momentum": 0.5}),
    ("scaffold", {"extrapolate": True}),
    ("scaffold", {"momentum": 0.5}),
    ("ssf", {"rank": 4}),
    ("ssf", {"rank": 4, "optimizer": {"name": "adamw", "eps": 1e-3}}),
    ("ssf", {"rank": 4, "preconditioner": "rows"}),
    ("ssf", {"rank": 4, "beta": 0.5, "compressor": {"name": "topk", "k": 0.5}}),
    ("ef21", {"compressor": {"name": "topk", "k": 0.3}}),
]


@pytest.mark.parametrize(("name", "settings"), KINDS)
def test_equal_numbers_give_the_same_bits(name: str, settings: dict[str, Any]) -> None:
    """K_i = K of every client is a run with K, also with weights whose sum is not exact."""
    for weights in ("uniform", "examples"):
        runs = []
        for steps in (None, np.full(7, 3)):
            problem = small(weights=weights)
            problem.weights = None if weights == "uniform" else np.arange(1, 8) / 28
            problem.steps = steps
            runs.append(advance(start(build(name, **settings), problem), 6))
        assert torch.equal(*map(model, runs))


@pytest.mark.parametrize(("name", "settings"), KINDS)
def test_a_cohort_takes_the_steps_of_its_clients(name: str, settings: dict[str, Any]) -> None:
    """Clients together, each with its own number, do what they do alone."""
    ends = []
    for simulate in ("batched", "loop"):
        problem = small()
        problem.steps = np.array(STEPS)
        problem.cohort_mode = "batched" if simulate == "batched" else "per_client"
        method = build(name, **settings)
        end = advance(start(method, problem, transport=Simulator(method, problem)), 6)
        ends.append(model(end))
    close(*ends)


@pytest.mark.parametrize(
    ("name", "settings"), [("fednova", {}), ("ssf", {"rank": 4}), ("scaffold", {"momentum": 0.5})]
)
def test_runtimes_agree(tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    """Clients on their own machines know their K_i, and the server all of them."""
    problem, method = small(), build(name, **settings)
    problem.steps = np.array(STEPS)
    across, _, _ = remote(method, problem, tmp_path)
    here = start(method, problem)
    close(model(advance(across, 6)), model(advance(here, 6)))


@pytest.mark.parametrize("weights", [None, np.arange(1, 8) / 28])
def test_c_stays_the_mean_of_the_controls(weights: Any) -> None:
    """After 1,000 rounds of random K_i, partial participation and lost replies."""
    rng, method = np.random.default_rng(2), build("ssf", rank=4)
    problem = small(seeds=(5,))
    problem.weights = weights
    simulator = Simulator(method, problem)
    lost = {(int(t), int(i)) for t, i in rng.integers(0, (1000, 7), (1000, 2))}
    loop = start(method, problem, transport=Scripted(simulator, lost))
    for _ in range(1000):
        problem.steps = rng.integers(1, 9, 7)
        advance(loop, 1)
    w = (
        torch.full((7,), 1 / 7, dtype=torch.float64)
        if weights is None
        else torch.from_numpy(weights)
    )
    c = (w.view(1, 7, 1) * simulator.clients().c).sum(1, keepdim=True)
    assert loop.server.c.norm() > 0.01
    assert (loop.server.c - c).norm() <= 1e-12 * loop.server.c.norm()


def error(name: str, rounds: int, cohort: int, lr: float, **settings: Any) -> float:
    """Relative error of 20 clients with their own targets, whose numbers of steps are spread over 20 ×."""
    problem = small(batch="full", clients=20, dim=40, outputs=3, samples=50, het=0.5, target_het=1)
    problem.steps = np.tile([1, 2, 5, 20], 5)
    loop = start(build(name, lr=lr, local_steps=5, **settings), problem, cohort)
    return float(problem.evaluate(model(advance(loop, rounds)))["rel_err"][0])


def test_fedavg_stops_at_a_wrong_point() -> None:
    """Whatever the step size, the plain mean counts a client by its steps. FedNova comes nearer with smaller steps."""
    plain = [error("fedavg", 1000, 20, lr, normalize=False) for lr in (2e-2, 2e-3)]
    nova = [error("fednova", 1000, 20, lr) for lr in (2e-2, 2e-3)]
    assert min(plain) > 0.1
    assert nova[1] < nova[0] / 3 < plain[1] / 3


@pytest.mark.parametrize(
    ("name", "rounds", "settings"),
    [("scaffold", 1200, {}), ("ssf", 4000, {"projector": {"name": "coordinate", "rank": 10}})],
)
def test_controls_reach_the_optimum(name: str, rounds: int, settings: dict[str, Any]) -> None:
    found = error(name, rounds, 5, 0.01, **settings)
    assert found < 1e-8


def test_normalize_is_not_for_mean_gradients() -> None:
    with pytest.raises(SpecError, match=r"`method\.normalize` = false is for methods"):
        build("ssf", normalize=False)
