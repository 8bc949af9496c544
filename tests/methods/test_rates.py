"""On heterogeneous quadratics with exact gradients: SCAFFOLD and SSF go to the optimum linearly, FedAvg stops short.

The same of compressed methods: which of them go on where others stall, and at what distance.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedspan.core.bundle import Bundle
from support.loops import advance, model, small, start
from support.methods import build


def errors(
    name: str,
    rounds: int,
    every: int,
    clients_per_round: int = 5,
    batch: int | str = "full",
    **settings: Any,
) -> np.ndarray:
    """Relative error over rounds: 20 clients with their own targets, 5 of them a round, 40 × 3 numbers."""
    problem = small(batch=batch, clients=20, dim=40, outputs=3, samples=50, het=0.5, target_het=1.0)
    loop = start(
        build(name, **({"lr": 0.02, "local_steps": 5} | settings)), problem, clients_per_round
    )
    found = []
    for _ in range(rounds // every):
        advance(loop, every)
        found.append(float(problem.evaluate(model(loop))["rel_err"][0]))
    return np.array(found)


@pytest.mark.parametrize(
    "projector",
    [
        {"name": "gaussian", "rank": 8},
        {"name": "coordinate", "rank": 8},
        {"name": "hadamard", "rank": 8},
    ],
)
def test_ssf_reaches_the_exact_optimum_at_a_linear_rate(projector: dict[str, Any]) -> None:
    found = errors("ssf", 4000, 200, projector=projector)
    assert found[-1] < 1e-10
    falling = np.log(found[(found > 1e-10) & (found < 0.3)])
    steps = np.diff(falling)
    assert len(steps) >= 4
    assert steps.max() < 0  # every 200 rounds lower than before
    line = np.polyfit(np.arange(len(falling)), falling, 1)
    rest = falling - np.polyval(line, np.arange(len(falling)))
    assert 1 - rest.var() / falling.var() > 0.98  # a straight line on a log axis


def test_scaffold_reaches_the_exact_optimum() -> None:
    assert errors("scaffold", 1500, 500)[-1] < 1e-10


def test_feddyn_reaches_the_exact_optimum() -> None:
    assert errors("feddyn", 1000, 500, drift={"alpha": 3.0})[-1] < 1e-10


def test_fedvarp_with_few_clients_ends_where_fedavg_with_everybody_does() -> None:
    wanted, noisy = (errors("fedavg", 500, 500, clients)[-1] for clients in (20, 5))
    assert errors("fedvarp", 500, 500)[-1] == pytest.approx(wanted, rel=1e-6)
    assert noisy > 1.3 * wanted


EIGHT = {
    "batch": "full",
    "clients": 8,
    "dim": 40,
    "outputs": 10,
    "samples": 50,
    "het": 0.5,
    "target_het": 1.0,
}


def after(name: str, rounds: int, clients_per_round: int, lr: float, **settings: Any) -> float:
    """Relative error of eight clients with their own targets, 40 × 10 numbers."""
    problem = small(**EIGHT)
    loop = start(build(name, lr=lr, local_steps=5, **settings), problem, clients_per_round)
    return float(problem.evaluate(model(advance(loop, rounds)))["rel_err"][0])


def two_exchanges(rounds: int, lr: float) -> float:
    """The same of the paper's PowerSGD at r = 1: this round's left factor, then the right one that goes with it."""
    problem, method = small(**EIGHT), build("fedavg", lr=lr, local_steps=5)
    loop = start(method, problem, 8)
    rnd, server = loop._round(), loop.server
    kept, q = torch.zeros(10, 40, dtype=torch.float64), torch.ones(40, dtype=torch.float64)
    for _ in range(rounds):
        _, up = method.client_step(
            Bundle(), method.broadcast(server, rnd), problem.cohort(rnd), rnd
        )
        M = -up.v.mean(1).view(10, 40) + kept
        left = M @ q / (M @ q).norm()
        q = M.T @ left
        kept = M - torch.outer(left, q)
        server = server.replace(x=server.x + torch.outer(left, q).view(1, 1, -1))
    return float(problem.evaluate(server.x)["rel_err"][0])


def test_with_everybody_powersgd_ends_where_fedavg_does() -> None:
    """The errors that are kept are sent in the end."""
    wanted = after("fedavg", 600, 8, lr=0.01)
    assert wanted > 1e-2
    for found in (after("powersgd", 600, 8, lr=0.01, rank=1), two_exchanges(600, lr=0.01)):
        assert found == pytest.approx(wanted, rel=1e-4)


def test_one_exchange_bears_a_smaller_step_than_the_papers_two() -> None:
    assert after("powersgd", 300, 8, lr=0.02, rank=1) > 1 > 0.1 > two_exchanges(300, lr=0.02)


def test_with_clients_sampled_powersgd_stops_further_off() -> None:
    assert 1.5 * after("fedavg", 300, 2, lr=0.01) < after("powersgd", 300, 2, lr=0.01, rank=4) < 1


@pytest.mark.parametrize(
    ("name", "settings"),
    [("fedavg", {}), ("subavg", {"projector": {"name": "gaussian", "rank": 8}})],
)
def test_without_controls_it_stalls(name: str, settings: dict[str, Any]) -> None:
    found = errors(name, 4000, 500, **settings)
    assert found[-1] > 1e-2
    assert found[-4:].min() > 0.3 * found[-4:].max()


TOPK, TENTH, RANDK = (
    {"name": "topk", "k": 0.05},
    {"name": "topk", "k": 0.1},
    {"name": "randk", "k": 0.1},
)
GRADIENT = {
    "clients_per_round": 20,
    "local_steps": 1,
}  # every client, one step: nothing but the compressor is in the way


def test_error_feedback_repairs_top_k() -> None:
    """Alone top-k leads to a wrong place, whatever the step. With feedback the distance falls with the step."""
    alone, fed = ([], [])
    for lr in (0.05, 0.005):
        alone.append(errors("compressed", 1500, 500, lr=lr, compressor=TOPK, **GRADIENT)[-1])
        fed.append(errors("ef", 1500, 500, lr=lr, compressor=TOPK, **GRADIENT)[-1])
    assert min(alone) > 0.4
    assert fed[0] < 0.15
    assert fed[1] < fed[0] / 5


def test_ef21_with_top_k_reaches_the_exact_optimum() -> None:
    assert errors("ef21", 1000, 500, lr=0.05, compressor=TOPK, **GRADIENT)[-1] < 1e-10


@pytest.mark.parametrize(
    ("name", "compressor", "rounds"),
    [
        ("scallion", RANDK, 3000),
        ("scallion", RANDK | {"k": 0.2}, 3000),
        ("scafcom", TENTH, 2000),
    ],
)
def test_compressed_controls_reach_the_exact_optimum(
    name: str, compressor: dict[str, Any], rounds: int
) -> None:
    """Where SCAFFOLD goes they go too, with a tenth of the uplink and with 5 of 20 clients a round."""
    assert errors(name, rounds, rounds, compressor=compressor)[-1] < 1e-8


def test_scallion_with_rand_k_ends_near_scaffold() -> None:
    """With mini-batches both have a floor; half of the coordinates cost less than twice of it."""
    noisy: dict[str, Any] = {"clients_per_round": 10, "batch": 20, "lr": 0.01}
    scaffold = errors("scaffold", 1200, 20, **noisy)[30:].mean()
    scallion = errors("scallion", 1200, 20, compressor={"name": "randk", "k": 0.5}, **noisy)[
        30:
    ].mean()
    assert scallion < 2 * scaffold
    assert (
        scallion
        < errors("compressed", 1200, 20, compressor={"name": "randk", "k": 0.5}, **noisy)[
            30:
        ].mean()
    )
