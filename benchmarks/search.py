"""How good is the learning rate that `lr = "search"` finds, compared with the best of a grid?

    python benchmarks/search.py [--methods ssf,scaffold] [--het 0.5] [--rounds 3000] [--seed 0] [--again]
    python benchmarks/search.py --digits [--rounds 20]

On the toy problem it takes the methods of benchmarks/map/toy.toml and compares the mean error over the last tenth of a
run with that of twelve rates from 1e-4 to 0.3, one to three minutes per method. Results are appended to
out/bench-search.jsonl, so a second call continues where the first one ended; the table is written to
out/bench-search.md. With `--digits` a small network is searched by its training loss, and compared by its test accuracy
at the end of a short run with nine rates from 0.01 to 3.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from pathlib import Path
from typing import Any

import bench
import numpy as np
import torch

from fedspan.api.step_size import search
from fedspan.core import tables
from fedspan.core.config import Settings
from fedspan.core.objective import Problem
from fedspan.core.spec import Spec
from fedspan.engine.loop import Loop
from fedspan.engine.simulator import Simulator
from fedspan.tasks.regression import Regression

ROOT = Path(__file__).parents[1]
GRID, DIGITS_GRID = np.geomspace(1e-4, 0.3, 12), np.geomspace(0.01, 3, 9)
COHORT = 10  # clients per round on the toy problem
HEADER = "| method | found | rounds of the search | error | best of the grid | its error | ratio |"
DIGITS = {
    "name": "classification",
    "data": "digits",
    "partition": {"name": "classes", "clients": 10},
}


def grids() -> dict[str, dict[str, Any]]:
    """Label and settings of each method in benchmarks/map/toy.toml."""
    return tomllib.loads((ROOT / "benchmarks" / "map" / "toy.toml").read_text("utf-8"))["variants"]


def metrics(
    method: Any, problem: Problem, lr: float, rounds: int, every: int, cohort: int, name: str
) -> list[float]:
    """A metric at every evaluation of a run; empty where it diverged."""
    method = dataclasses.replace(method, lr=lr)
    with Simulator(method, problem) as clients:
        rows = list(Loop(method, problem, clients, problem.seeds, cohort).rows(rounds, every))
    return (
        []
        if any(row.diverged.any() for row in rows)
        else [float(row.metrics[name][0]) for row in rows]
    )


def measure(table: dict[str, Any], het: float, rounds: int, seed: int) -> dict[str, Any]:
    """A search on the toy problem and the grid."""
    problem = Regression(het=het).build((seed,), Settings(batch_size=20))
    method = tables.build("method", table)

    def tail(lr: float) -> float:
        errors = metrics(method, problem, lr, rounds, rounds // 100, COHORT, "rel_err")
        return float(np.mean(errors[-10:])) if errors else math.inf

    found = search(method, problem, COHORT, rounds)
    errors = [tail(float(lr)) for lr in GRID]
    best, error = int(np.argmin(errors)), tail(found.lr)
    return {
        "lr": found.lr,
        "rounds": found.rounds,
        "error": error,
        "best": GRID[best],
        "least": errors[best],
        "ratio": error / errors[best],
    }


def line(label: str, row: dict[str, Any], rounds: int) -> str:
    """A row of the table."""
    spent = f"{row['rounds']} ({row['rounds'] / rounds:.0%})"
    cells = (
        label,
        f"{row['lr']:.2g}",
        spent,
        f"{row['error']:.2e}",
        f"{row['best']:.2g}",
        f"{row['least']:.2e}",
    )
    return "| " + " | ".join(cells) + f" | {row['ratio']:.2f} |"


def digits(names: list[str], rounds: int, seed: int) -> None:
    """Print the test accuracy of searched rates and of the best of a grid."""
    print(
        "| method | found | rounds of the search | accuracy % | best of the grid | its accuracy % |",
        "|---" * 6 + "|",
        sep="\n",
    )
    for name in names:
        table = {"name": name, "local_steps": 5} | (
            {"rank": 0.2, "drift": {"correction": "always"}} if name == "ssf" else {}
        )
        run = {
            "rounds": rounds,
            "batch_size": 16,
            "seed": seed,
            "participation": {"weights": "uniform"},
        }
        spec = Spec.from_table(run | {"method": table, "task": DIGITS})
        problem: Any = spec.task.build((seed,), spec)
        found = search(
            spec.method, problem, 5, rounds
        )  # by the training loss: a search sees no test set
        ends = {
            float(lr): 100
            * (metrics(spec.method, problem, float(lr), rounds, rounds, 5, "accuracy") or [0.0])[-1]
            for lr in (found.lr, *DIGITS_GRID)
        }
        best = max(DIGITS_GRID, key=lambda lr: ends[float(lr)])
        spent = f"{found.rounds} ({found.rounds / rounds:.0%})"
        print(
            f"| {name} | {found.lr:.2g} | {spent} | {ends[found.lr]:.1f} | {best:.2g} | {ends[float(best)]:.1f} |",
            flush=True,
        )


def toy(names: list[str], het: float, rounds: int, seed: int, again: bool) -> None:
    """Measure what is not there yet, and write the table."""
    known, asked = grids(), {"het": het, "of": rounds, "seed": seed}
    kept = ROOT / "out" / "bench-search.jsonl"
    kept.parent.mkdir(exist_ok=True)
    there = (
        [json.loads(text) for text in kept.read_text("utf-8").splitlines()]
        if kept.exists() and not again
        else []
    )
    done = {row["name"]: row for row in there if asked.items() <= row.items()}
    lines = [HEADER, "|---" * 7 + "|"]
    print("\n".join(lines))
    for name in names or list(known):
        if name not in done:
            done[name] = {"name": name} | asked | measure(known[name]["method"], het, rounds, seed)
            with kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps(done[name]) + "\n")
        lines.append(line(known[name]["label"], done[name], rounds))
        print(lines[-1], flush=True)
    (ROOT / "out" / "bench-search.md").write_text("\n".join(lines) + "\n", "utf-8")


def main() -> None:
    """Run one of the two comparisons."""
    parser = bench.arguments(__doc__)
    parser.add_argument("--methods", help="names separated by commas; all by default")
    parser.add_argument("--het", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, help="3000 by default, 20 with --digits")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--again", action="store_true", help="measure again what is already in out/"
    )
    parser.add_argument("--digits", action="store_true", help="a network, in a short run")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.short:
        args.digits, args.methods, args.rounds = True, "ssf", 5
    names = args.methods.split(",") if args.methods else []
    if args.digits:
        digits(names or ["fedavg", "scaffold", "ssf"], args.rounds or 20, args.seed)
    else:
        toy(names, args.het, args.rounds or 3000, args.seed, args.again)


if __name__ == "__main__":
    bench.start(main)
