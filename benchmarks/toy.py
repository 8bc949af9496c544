"""Speed of the simulator on the toy problem, against a plain batched NumPy program, in one process and one thread.

    python benchmarks/toy.py [--yardstick ../shared/bench/toy_numpy.py] [--rounds 400] [--repeats 9]

Each repeat times the yardstick and fedspan in turn, a short piece each; the ratio is of the medians, so that a slow
spell of the machine hits both. Writes the table it prints to out/bench-toy.md.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import torch

from fedspan.core import registry
from fedspan.core.config import Settings
from fedspan.engine.loop import Loop
from fedspan.engine.simulator import Simulator

ROOT = Path(__file__).parents[1]


def yardstick(path: Path) -> ModuleType:
    """The NumPy program, as a module."""
    if not path.is_file():
        sys.exit(f"error: no yardstick at {path}; name it with --yardstick")
    spec = importlib.util.spec_from_file_location("toy_numpy", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_loop(method: str, seeds: int = 1, clients: int = 20) -> Loop:
    """N = 20, S = 10, K = 5, r = 20, as in the yardstick."""
    table = {"name": method, "lr": 1e-3, "local_steps": 5}
    if method == "ssf":
        table["projector"] = {"name": "gaussian", "rank": 20}
    built = registry.build("method", table)
    of_runs = tuple(range(seeds))
    task = registry.build("task", {"name": "regression", "het": 2.0, "clients": clients})
    problem = task.build(of_runs, Settings(batch_size=20))
    loop = Loop(built, problem, Simulator(built, problem), of_runs, 10)
    next(loop.rows(1, 1))
    return loop


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def advance(loop: Loop, rounds: int) -> None:
    """Go on by some rounds, with an evaluation every 100 as in the yardstick."""
    for _ in loop.rows(loop.t + rounds, 100):
        pass


def main() -> None:
    """Time every pair and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--yardstick", type=Path, default=ROOT.parent / "shared/bench/toy_numpy.py")
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    numpy = yardstick(args.yardstick)
    n = args.rounds

    def theirs(method: str, times: int = 1) -> Callable[[], object]:
        return lambda: [numpy.run(method, 2.0, 1e-3, n, seed=s) for s in range(times)]

    def ours(method: str, seeds: int = 1, clients: int = 20) -> Callable[[], object]:
        loop = make_loop(method, seeds, clients)
        advance(loop, 100)
        return lambda: advance(loop, n)

    pairs = [
        ("SSF, three seeds at once / yardstick three times", theirs("ssf", 3), ours("ssf", 3), 3.0),
        ("SSF, one seed", theirs("ssf"), ours("ssf"), 1.8),
        ("SCAFFOLD", theirs("scaffold"), ours("scaffold"), 1.5),
        ("FedAvg", theirs("fedavg"), ours("fedavg"), 1.5),
        ("SSF, 2,000 clients (against 20)", ours("ssf", clients=2000), ours("ssf"), None),
    ]
    gc.collect()
    times: list[tuple[list[float], list[float]]] = [([], []) for _ in pairs]
    for _ in range(args.repeats):
        for (_, a, b, _), (left, right) in zip(pairs, times, strict=True):
            left.append(seconds(a))
            right.append(seconds(b))
    lines = ["| what | yardstick, µs a round | fedspan, µs a round | ratio | wanted |", "|---|---|---|---|---|"]
    for (name, _, _, wanted), (left, right) in zip(pairs, times, strict=True):
        a, b = statistics.median(left) / n * 1e6, statistics.median(right) / n * 1e6
        want = f"≥ {wanted}" if wanted else "≤ 1.5"
        lines.append(f"| {name} | {a:.0f} | {b:.0f} | {a / b:.2f} | {want} |")
    text = "\n".join(lines)
    print(text)
    out = ROOT / "out"
    out.mkdir(exist_ok=True)
    (out / "bench-toy.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
