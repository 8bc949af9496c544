"""What to do with an optimizer's moments between rounds: reset them, or re-project them.

    python benchmarks/moments.py [--rounds 40] [--seeds 2] [--method ssf] [--rank 0.25] [--projector coordinate]

scikit-learn's digits, ten clients with two digits each, five clients per round, 5 local steps, an MLP. Every row is
tuned over the same grid of learning rates and shown at its best: the accuracy over the last quarter of the rounds, mean
± standard deviation over seeds, and the accuracy half-way. * marks a rate at the edge of the grid.
Writes out/bench-moments.md.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import bench
import numpy as np
import torch

from fedspan.core import tables
from fedspan.core.config import Participation, Settings
from fedspan.core.objective import Problem
from fedspan.engine.loop import Loop
from fedspan.engine.simulator import Simulator

ROOT = Path(__file__).parents[1]
TASK = {"name": "classification", "data": "digits", "partition": {"name": "classes", "clients": 10}}
OPTIMIZERS: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "AdamW": ({"name": "adamw"}, (0.002, 0.005, 0.01, 0.02, 0.05)),
    "SGD, momentum 0.9": ({"name": "sgd", "momentum": 0.9}, (0.02, 0.05, 0.1, 0.2, 0.5)),
}
PLAIN = ("plain SGD", (0.1, 0.2, 0.5, 1.0, 2.0))
VARIANTS = ((1, "reset"), (1, "project"), (5, "reset"), (5, "project"))
UNIFORM = Participation(weights="uniform")
EVERY = 5  # rounds between two evaluations


def accuracies(table: dict[str, Any], problem: Problem, rounds: int) -> list[float]:
    """Test accuracy at every evaluation, 0 after a divergence."""
    method = tables.build("method", table)
    loop = Loop(method, problem, Simulator(method, problem), problem.seeds, 5)
    found = [
        0.0 if row.diverged.any() else float(row.metrics["accuracy"][0])
        for row in loop.rows(rounds, EVERY)
    ]
    return found + [0.0] * (rounds // EVERY + 1 - len(found))


def line(
    name: str, table: dict[str, Any], rates: tuple[float, ...], problems: list[Problem], rounds: int
) -> str:
    """A row of the table: a variant at its best learning rate."""
    runs = np.array(
        [[accuracies(table | {"lr": lr}, problem, rounds) for problem in problems] for lr in rates]
    )
    tails = 100 * runs[:, :, -max(1, runs.shape[2] // 4) :].mean(2)
    best = int(tails.mean(1).argmax())
    edge = "*" if best in (0, len(rates) - 1) else ""
    half = 100 * runs[best, :, runs.shape[2] // 2].mean()
    spread = tails[best].std(ddof=1) if len(problems) > 1 else 0.0
    cells = (
        name,
        table["space"]["refresh"],
        table.get("local", {}).get("moments", "none"),
        f"{rates[best]:g}{edge}",
        f"{half:.1f}",
    )
    return "| " + " | ".join(map(str, cells)) + f" | {tails[best].mean():.1f} ± {spread:.1f} |"


def main() -> None:
    """Measure and write the table."""
    parser = bench.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--method", choices=("ssf", "subavg"), default="ssf")
    parser.add_argument("--rank", type=float, default=0.25)
    parser.add_argument(
        "--projector", choices=("coordinate", "gaussian", "hadamard"), default="coordinate"
    )
    args = parser.parse_args()
    if args.short:
        args.rounds, args.seeds = 5, 1
    torch.set_num_threads(1)
    problems = [
        tables.build("task", TASK).build((seed,), Settings(batch_size=16, participation=UNIFORM))
        for seed in range(args.seeds)
    ]
    space = {"name": args.projector}
    base: dict[str, Any] = {
        "name": args.method,
        "local_steps": 5,
        "rank": args.rank,
    }
    base |= {"drift": {"correction": "always"}} if args.method == "ssf" else {}
    lines = [
        "| local steps | refresh | moments | best lr | half-way % | accuracy % |",
        "|---" * 6 + "|",
    ]
    print("\n".join(lines))
    for refresh in (1, 5):
        lines.append(
            line(
                PLAIN[0],
                base | {"space": space | {"refresh": refresh}},
                PLAIN[1],
                problems,
                args.rounds,
            )
        )
        print(lines[-1], flush=True)
    for (name, (settings, rates)), (refresh, moments) in itertools.product(
        OPTIMIZERS.items(), VARIANTS
    ):
        table = base | {
            "space": space | {"refresh": refresh},
            "local": settings | {"moments": moments},
        }
        lines.append(line(name, table, rates, problems, args.rounds))
        print(lines[-1], flush=True)
    (ROOT / "out").mkdir(exist_ok=True)
    (ROOT / "out" / "bench-moments.md").write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    bench.start(main)
