"""On heterogeneous quadratics with exact gradients: SCAFFOLD and SSF go to the optimum linearly, FedAvg stops short."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from conftest import advance, build, model, small, start


def errors(name: str, rounds: int, every: int, **settings: Any) -> np.ndarray:
    """Relative error over rounds: 20 clients with their own targets, 5 of them a round, 40 × 3 numbers."""
    problem = small(batch="full", clients=20, dim=40, outputs=3, samples=50, het=0.5, target_het=1.0)
    loop = start(build(name, lr=0.02, local_steps=5, **settings), problem, 5)
    found = []
    for _ in range(rounds // every):
        advance(loop, every)
        found.append(float(problem.evaluate(model(loop))["rel_err"][0]))
    return np.array(found)


@pytest.mark.parametrize(
    "projector", [{"name": "gaussian", "rank": 8}, {"name": "coordinate", "rank": 8}, {"name": "hadamard", "rank": 8}]
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


@pytest.mark.parametrize(
    ("name", "settings"), [("fedavg", {}), ("subavg", {"projector": {"name": "gaussian", "rank": 8}})]
)
def test_without_controls_it_stalls(name: str, settings: dict[str, Any]) -> None:
    found = errors(name, 4000, 500, **settings)
    assert found[-1] > 1e-2
    assert found[-4:].min() > 0.3 * found[-4:].max()
