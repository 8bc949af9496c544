"""Speed of the simulator on the toy problem, against a plain batched NumPy program, in one process and one thread.

    python benchmarks/toy.py [--rounds 100] [--repeats 40]

The program is benchmarks/toy_numpy.py. Each repeat measures the CPU time of the program and of fedspan in turn, a short
piece each; the ratio is of the least times. Writes the table it prints to out/bench-toy.md.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import bench  # first: it sets the number of threads
import torch
import toy_numpy

from fedspan.core import tables
from fedspan.core.config import Settings
from fedspan.engine.loop import Loop
from fedspan.engine.simulator import Simulator

ROOT = Path(__file__).parents[1]
WANTED = {"SSF": 2.0, "SSF, three seeds": 3.3, "SCAFFOLD": 1.8, "FedAvg": 1.8}


def make_loop(method: str, seeds: int = 1, clients: int = 20) -> Loop:
    """N = 20, S = 10, K = 5, r = 20, as in toy_numpy."""
    settings = {"name": method, "lr": 1e-3, "local_steps": 5}
    if method == "ssf":
        settings |= {
            "space": {"name": "gaussian", "rank": 20},
            "drift": {"name": "controls", "correction": "always"},
        }  # as in toy_numpy
    built = tables.build("method", settings)
    of_runs = tuple(range(seeds))
    task = tables.build("task", {"name": "regression", "het": 2.0, "clients": clients})
    problem = task.build(of_runs, Settings(batch_size=20))
    return Loop(built, problem, Simulator(built, problem), of_runs, 10)


def advance(loop: Loop, rounds: int) -> None:
    """Go on by some rounds, with an evaluation every 100 as in toy_numpy."""
    for _ in loop.rows(loop.t + rounds, 100):
        pass


def measure(rounds: int, repeats: int) -> list[bench.Row]:
    """The rows of the table, from `repeats` pieces of `rounds` rounds."""
    torch.set_num_threads(1)

    def ours(method: str, seeds: int = 1, clients: int = 20) -> Callable[[], object]:
        loop = make_loop(method, seeds, clients)
        return lambda: advance(loop, rounds)

    fedspan = {
        "SSF": ours("ssf"),
        "SSF, three seeds": ours("ssf", seeds=3),
        "SCAFFOLD": ours("scaffold"),
        "FedAvg": ours("fedavg"),
        "SSF, 2,000 clients": ours("ssf", clients=2000),
    }
    data = toy_numpy.problem(2.0)  # rounds are compared, not the making of the data

    def theirs(name: str) -> Callable[[], object]:
        method, times = name.split(",")[0].lower(), 3 if "three" in name else 1
        return lambda: [toy_numpy.run(data, method, 1e-3, rounds, seed=s) for s in range(times)]

    work = {
        (name, who): one
        for name in WANTED
        for who, one in (("peer", theirs(name)), ("fedspan", fedspan[name]))
    }
    work["SSF, 2,000 clients", "fedspan"] = fedspan["SSF, 2,000 clients"]
    least = {key: 1e6 * seconds / rounds for key, seconds in bench.cpu_times(work, repeats).items()}

    rows = []
    for name, wanted in WANTED.items():
        peer, own = least[name, "peer"], least[name, "fedspan"]
        label = f"toy, {name}, µs per round"
        rows.append(bench.Row(label, f"NumPy {peer:.0f}", f"{own:.0f}", peer / own, wanted))
    few, many = least["SSF", "fedspan"], least["SSF, 2,000 clients", "fedspan"]
    label = "toy, SSF, 2,000 clients against 20, µs per round"
    return [
        *rows,
        bench.Row(
            label, f"20 clients {few:.0f}", f"{many:.0f}", many / few, 1.2, larger_is_better=False
        ),
    ]


def short() -> list[bench.Row]:
    """For `make bench`."""
    return measure(rounds=100, repeats=15)


def main() -> None:
    """Measure every pair and print the table."""
    parser = bench.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=40)
    args = parser.parse_args()
    text = bench.table(measure(args.rounds, 3 if args.short else args.repeats))
    print(text)
    out = ROOT / "out"
    out.mkdir(exist_ok=True)
    (out / "bench-toy.md").write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    bench.start(main)
