"""How good is the step that `lr = "search"` finds? Every method of the map, on the toy.

    python benchmarks/search.py [--methods ssf,scaffold] [--het 0.5] [--rounds 3000] [--seed 0] [--again]

The methods are those of benchmarks/map/toy.toml. The step found in at most 15 % of the rounds is run for all of them,
and so is each of a grid of twelve from 1e-4 to 0.3; compared is the error over the last tenth of a run. Takes one to
three minutes a method. Lines are kept in out/bench-search.jsonl as they come; a second call goes on where the first
ended, and the table of what was asked for is written to out/bench-search.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedspan.core import registry
from fedspan.core.objective import Problem
from fedspan.engine.loop import Loop
from fedspan.engine.simulator import Simulator
from fedspan.tasks.regression import Regression
from fedspan.theory.lr_search import search

ROOT = Path(__file__).parents[1]
GRID = np.geomspace(1e-4, 0.3, 12)
PER_ROUND = 10
HEADER = "| method | found | rounds of the search | error | best of the grid | its error | ratio |"


def tables() -> dict[str, dict[str, Any]]:
    """The map's methods by name: label and settings."""
    return tomllib.loads((ROOT / "benchmarks" / "map" / "toy.toml").read_text())["variants"]


def tail(method: Any, problem: Problem, lr: float, rounds: int) -> float:
    """The mean error over the last tenth of a run; infinite where it diverged."""
    method = dataclasses.replace(method, lr=lr)
    with Simulator(method, problem) as clients:
        loop = Loop(method, problem, clients, problem.seeds, PER_ROUND)
        rows = list(loop.rows(rounds, rounds // 100))
    if any(row.diverged.any() for row in rows):
        return math.inf
    return float(np.mean([float(row.metrics["rel_err"][0]) for row in rows[-10:]]))


def measure(table: dict[str, Any], het: float, rounds: int, seed: int) -> dict[str, Any]:
    """A search and the grid beside it."""
    problem, method = Regression(het=het).build((seed,), torch.float32), registry.build("method", {"lr": 1.0} | table)
    found = search(method, problem, PER_ROUND, rounds)
    errors = [tail(method, problem, float(lr), rounds) for lr in GRID]
    best = int(np.argmin(errors))
    error = tail(method, problem, found.lr, rounds)
    ratio = error / errors[best]
    return {
        "lr": found.lr,
        "rounds": found.rounds,
        "error": error,
        "best": GRID[best],
        "least": errors[best],
        "ratio": ratio,
    }


def line(label: str, row: dict[str, Any], rounds: int) -> str:
    """A row of the table."""
    cells = (
        label,
        f"{row['lr']:.2g}",
        f"{row['rounds']} ({row['rounds'] / rounds:.0%})",
        f"{row['error']:.2e}",
        f"{row['best']:.2g}",
        f"{row['least']:.2e}",
        f"{row['ratio']:.2f}",
    )
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--methods", help="names of the map's variants, with commas; all unless it is said")
    parser.add_argument("--het", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", action="store_true", help="measure anew what is there already")
    args = parser.parse_args()
    torch.set_num_threads(1)
    known = tables()
    names = args.methods.split(",") if args.methods else list(known)
    kept, asked = ROOT / "out" / "bench-search.jsonl", {"het": args.het, "of": args.rounds, "seed": args.seed}
    kept.parent.mkdir(exist_ok=True)
    there = [json.loads(text) for text in kept.read_text().splitlines()] if kept.exists() and not args.again else []
    done = {row["name"]: row for row in there if asked.items() <= row.items()}
    lines = [HEADER, "|---" * 7 + "|"]
    print("\n".join(lines))
    for name in names:
        if name not in done:
            done[name] = {"name": name} | asked | measure(known[name]["method"], args.het, args.rounds, args.seed)
            with kept.open("a") as file:
                file.write(json.dumps(done[name]) + "\n")
        lines.append(line(known[name]["label"], done[name], args.rounds))
        print(lines[-1], flush=True)
    (ROOT / "out" / "bench-search.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
