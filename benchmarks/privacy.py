"""What noise does to controls, and what per-example clipping costs: the figures of docs/privacy.md.

python benchmarks/privacy.py walk        the distance between c and mean_i c_i, with and without a leak
python benchmarks/privacy.py examples    a local step with privacy of examples, in d and in r numbers
"""

from __future__ import annotations

import time
from typing import Any

import bench
import numpy as np
import torch
from torch import nn

from fedspan.core import tables
from fedspan.core.config import Participation, Settings
from fedspan.core.privacy import Privacy
from fedspan.core.projector import draw
from fedspan.core.round import Round
from fedspan.engine.loop import Loop
from fedspan.engine.simulator import Simulator
from fedspan.nn.client_data import as_client_data
from fedspan.nn.problem import TorchProblem
from fedspan.nn.projection_rules import projection_rules
from fedspan.projectors import Coordinate
from fedspan.replies.chain import Chain
from fedspan.replies.noise import Mechanism
from fedspan.tasks.regression import Regression

CLIENTS, COHORT, ROUNDS = 50, 25, 400
MARKS = (1, 10, 100, 400)
METHODS: dict[str, dict[str, Any]] = {
    "ssf": {"lr": 0.02, "rank": 0.5, "drift": {"correction": "always"}},
    "scaffold": {"lr": 0.01},
}


def walk(rounds: int) -> None:
    """Prints the distances."""
    print(
        f"{CLIENTS} clients, {COHORT} expected per round, σ = 1, C = 1; in units of the noise of one round in c"
    )
    print(
        f"{'method':10} {'leak':>5}  "
        + "  ".join(f"t={t:<5}" for t in MARKS)
        + "  error at the end"
    )
    for name, own in METHODS.items():
        for noise, leak in (
            (0.0, 0.0),
            (1.0, 0.0),
            (1.0, 0.02),
            (1.0, 0.1),
            (1.0, 0.5),
            (1.0, 0.99),
        ):
            walked(name, own, noise, leak, rounds)


def walked(name: str, own: dict[str, Any], noise: float, leak: float, rounds: int) -> None:
    """One run: ‖c − mean c_i‖ after some rounds, and how far x is from the optimum."""
    plain = Participation(weights="uniform")
    problem = Regression(
        clients=CLIENTS, dim=20, outputs=2, samples=20, het=1.0, target_het=1.0
    ).build((0,), Settings(batch_size=10, dtype="float64", participation=plain))
    method = tables.build("method", {"name": name, "local_steps": 5} | own)
    made = Mechanism(Privacy(clip=1.0, noise=noise, delta=1e-5, leak=leak), CLIENTS, COHORT, rounds)
    chain = Chain(method, noise=made)
    loop = Loop(
        method, problem, Simulator(method, problem), (0,), COHORT, rounds=rounds, chain=chain
    )
    found, errors = [], []
    with torch.inference_mode():
        while loop.t < rounds:
            loop.step()
            if loop.t in MARKS:
                kept = torch.from_numpy((1 - leak) ** (loop.t - loop.last_round[0].astype(float)))[
                    None, :, None
                ]
                apart = loop.server.c - (loop.transport.clients().c * kept).mean(1, keepdim=True)
                sent = 20 if name == "ssf" else 40
                found.append(float(apart.norm()) / (max(noise, 1.0) * sent**0.5 / CLIENTS))
            if loop.t > 0.9 * rounds:
                errors.append(float(problem.evaluate(loop.model())["rel_err"][0]))
    label = f"{leak:5}" if noise else "none "
    print(
        f"{name:10} {label}  "
        + "  ".join(f"{one:7.2f}" for one in found)
        + f"  {sum(errors) / len(errors):.3f}"
    )


def examples() -> None:
    """CPU time of a step on 16 examples, with and without privacy: the best of several, in turns."""
    for width in (128, 1024):
        torch.manual_seed(0)
        steps = {name: step(width, *how) for name, how in WAYS.items()}
        times: dict[str, list[float]] = {name: [] for name in steps}
        with torch.inference_mode():
            for _ in range(5):
                for name, one in steps.items():
                    began = time.process_time()
                    one()
                    times[name].append(1e3 * (time.process_time() - began))
        print(
            f"MLP 784-{width}-{width}-10: "
            + ", ".join(f"{name} {min(found):.1f} ms" for name, found in times.items())
        )


WAYS = {
    "plain, d": (False, False),
    "plain, r": (False, True),
    "private, d": (True, False),
    "private, r": (True, True),
}


def step(width: int, private: bool, inside: bool) -> Any:
    """One gradient of a local step, in d numbers or in r of them."""
    model = nn.Sequential(
        nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )
    data = as_client_data((torch.randn(16, 784), torch.arange(16) % 10), "client 0")
    privacy = Privacy(level="example", clip=1.0, noise=1.0) if private else None

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    settings = Settings(batch_size=16, privacy=privacy)
    problem = TorchProblem(model, [data], loss, projection_rules(model), settings)
    f = problem.cohort(Round(0, (0,), 1, problem.layout, np.array([[0]]), np.array([[-1]])))
    if not inside:
        direction, start = f.direction(), problem.x0
    else:
        P = draw(Coordinate(rank=0.1), problem.layout, (0,), 0)
        direction, start = f.restrict(problem.x0, P), problem.x0.new_zeros(1, 1, P.rank)
    return lambda: direction(start)


def main() -> None:
    """Print one of the two."""
    parser = bench.arguments(__doc__)
    parser.add_argument("what", choices=("walk", "examples"), nargs="?", default="examples")
    given = parser.parse_args()
    if given.what == "walk":
        walk(40 if given.short else ROUNDS)
    else:
        examples()


if __name__ == "__main__":
    bench.start(main)
