"""What noise does to controls, and what per-example clipping costs: the figures of docs/privacy.md.

python benchmarks/privacy.py walk        the distance between c and mean_i c_i, with and without a leak
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from fedspan.checks.bench import settings
from fedspan.core import registry
from fedspan.core.config import Participation, Privacy
from fedspan.engine.loop import Loop
from fedspan.engine.simulator import Simulator
from fedspan.privacy.mechanism import Mechanism
from fedspan.tasks.regression import Regression

CLIENTS, COHORT, ROUNDS = 50, 25, 400
MARKS = (1, 10, 100, 400)
METHODS: dict[str, dict[str, Any]] = {
    "ssf": {"lr": 0.02, "projector": {"name": "coordinate", "rank": 0.5}},
    "scaffold": {"lr": 0.01, "uplink": "control"},
}


def main() -> None:
    """Prints the distances."""
    print(f"{CLIENTS} clients, {COHORT} expected per round, σ = 1, C = 1; in units of the noise of one round in c")
    print(f"{'method':10} {'leak':>5}  " + "  ".join(f"t={t:<5}" for t in MARKS) + "  error at the end")
    for name, own in METHODS.items():
        for noise, leak in ((0.0, 0.0), (1.0, 0.0), (1.0, 0.02), (1.0, 0.1), (1.0, 0.5), (1.0, 0.99)):
            walked(name, own, noise, leak)


def walked(name: str, own: dict[str, Any], noise: float, leak: float) -> None:
    """One run: ‖c − mean c_i‖ after some rounds, and how far x is from the optimum."""
    problem = Regression(clients=CLIENTS, dim=20, outputs=2, samples=20, het=1.0, target_het=1.0).build(
        (0,), settings(10)
    )
    method = registry.build("method", {"name": name, "local_steps": 5} | own)
    made = Mechanism.of(Privacy(clip=1.0, noise=noise, delta=1e-5, leak=leak), CLIENTS, COHORT, ROUNDS)
    end = Simulator(method, problem, participation=Participation(weights="uniform", screen=None))
    loop = Loop(method, problem, end, (0,), COHORT, rounds=ROUNDS, privacy=made)
    found, errors = [], []
    with torch.inference_mode():
        while loop.t < ROUNDS:
            loop.step()
            if loop.t in MARKS:
                kept = torch.from_numpy((1 - leak) ** (loop.t - loop.last_round[0].astype(float)))[None, :, None]
                apart = loop.server.c - (end.clients().c * kept).mean(1, keepdim=True)
                sent = 20 if name == "ssf" else 40
                found.append(float(apart.norm()) / (max(noise, 1.0) * sent**0.5 / CLIENTS))
            if loop.t > 0.9 * ROUNDS:
                errors.append(float(problem.evaluate(loop.model())["rel_err"][0]))
    label = f"{leak:5}" if noise else "none "
    print(f"{name:10} {label}  " + "  ".join(f"{one:7.2f}" for one in found) + f"  {sum(errors) / len(errors):.3f}")


if __name__ == "__main__":
    if sys.argv[1:] != ["walk"]:
        raise SystemExit(__doc__)
    main()
