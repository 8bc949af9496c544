"""What many clients and long runs cost: time per round, start, memory, checkpoints, and the server's end of `remote`.

    python benchmarks/population.py [--clients 1000 10000 100000 1000000] [--rounds 30]

SSF with a rank of 0.1 on a network of 101,770 numbers (784-128-10), 10 clients per round whatever the population, 20
examples per client. Client states are kept in memory and on disk. Each population is a process of its own; a row that
is already in out/bench-population.jsonl is not measured again. Writes out/bench-population.md.

Times are CPU times of one thread. "memory" is the growth of the process beyond the model and the clients' data, which
are tensors in a list.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bench  # first: it sets the number of threads
import numpy as np
import torch
from torch import nn

import fedspan
from fedspan.api.step_size import resolve
from fedspan.core import checkpoint
from fedspan.core.config import Engine
from fedspan.core.layout import Block, Layout
from fedspan.costs.traffic import FlatProblem
from fedspan.drifts import Controls
from fedspan.engine.loop import Loop
from fedspan.engine.simulator import Simulator
from fedspan.methods import SSF
from fedspan.remote.messages import Agreement, RoundMessage
from fedspan.remote.server import RemoteTransport
from fedspan.tasks._module import Material
from fedspan.tasks.custom import Custom

OUT = Path(__file__).parents[1] / "out"
STATES = ("memory", "disk")
COHORT = 10
IN_MEMORY = 10_000  # clients; the states of more would be refused on a machine with 24 GB


def resident() -> float:
    """Megabytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text("utf-8").split()[1]) * 4096 / 1e6


def population(clients: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Clients whose examples are parts of one pool."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(5000, 784, generator=draw), torch.randint(0, 10, (5000,), generator=draw)
    starts = (np.arange(clients) * 7 % 4980).tolist()
    return [(x[start : start + 20], y[start : start + 20]) for start in starts]


def of_states(states: str, folder: Path) -> Engine:
    """Where client states are kept."""
    return Engine(
        simulate="loop",
        states_dir=folder / "states" if states == "disk" else None,
    )


def measure(states: str, clients: int, rounds: int) -> dict[str, Any]:
    """One population: seconds to start, milliseconds per round, and megabytes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    data, method = population(clients), SSF(rank=0.1, lr=0.1, local_steps=3)
    before, began = resident(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        engine = of_states(states, Path(folder))
        task = Custom(objects=Material.of(model, data))
        spec = fedspan.Spec(
            rounds=rounds,
            method=method,
            task=task,
            clients_per_round=COHORT,
            batch_size=10,
            engine=engine,
        )
        problem = task.build((0,), spec)
        method, _ = resolve(spec, problem)
        loop = Loop(method, problem, Simulator(method, problem, engine), (0,), COHORT)
        start = time.process_time() - began
        times = list(_times(loop, rounds))
        began = time.process_time()
        checkpoint.save(Path(folder) / "c", loop.save(), {})
        saved = time.process_time() - began
        size = (Path(folder) / "c").stat().st_size / 1e6
    return {
        "states": states, "clients": clients, "start": start, "round": 1e3 * min(times), "save": saved,
        "checkpoint": size, "memory": resident() - before,
    }  # fmt: skip


def _times(loop: Loop, rounds: int) -> Iterator[float]:
    with torch.inference_mode():
        for _ in range(rounds):
            began = time.process_time()
            loop.step()
            yield time.process_time() - began


class Replies:
    """A channel that replies at once."""

    def deliver(self, messages: list[RoundMessage]) -> Iterator[tuple[int, RoundMessage]]:
        """A reply of 10,000 numbers to each message."""
        for index, m in enumerate(messages):
            arrays = {"v": torch.full((1, 1, 10_000), 0.01)}
            yield index, dataclasses.replace(m, status="ok", arrays=arrays)


def replies_per_minute(cohort: int = 200, rounds: int = 3) -> float:
    """How many replies of r = 10,000 the server's end takes, with copies of states of d = 100,000 on disk."""
    layout = Layout((Block("w", (100, 1000), 1),), torch.float32)
    method, problem = (
        SSF(rank=100, lr=0.1, local_steps=1, drift=Controls()),
        FlatProblem(layout, 2 * cohort),
    )
    with tempfile.TemporaryDirectory() as folder:
        agreement, copies = Agreement.of({}, layout, 0), Path(folder)
        x0 = torch.zeros(1, 1, layout.size)
        problem.x0 = x0  # of a large model it has no numbers
        end = RemoteTransport(
            method, layout, x0, 2 * cohort, Replies(), agreement, copies_dir=copies
        )
        loop = Loop(method, problem, end, (0,), cohort)
        times = list(_times(loop, rounds + 1))[1:]
        assert not loop.events
    return 60 * cohort / min(times)


def checkpoint_growth(rounds: tuple[int, int] = (100, 1000)) -> tuple[float, float]:
    """Bytes of a checkpoint after few and many rounds of the toy problem, with an evaluation per round."""
    task = {"name": "regression", "dim": 20, "clients": 20, "samples": 10}
    method = {"name": "ssf", "lr": 1e-3, "local_steps": 1, "rank": 2}
    sizes = []
    for count in rounds:
        with tempfile.TemporaryDirectory() as folder:
            spec = {"rounds": count, "clients_per_round": 5, "method": method, "task": task}
            fedspan.run(spec, folder, progress=False)
            sizes.append((Path(folder) / "checkpoint.safetensors").stat().st_size)
    return sizes[0], sizes[1]


def rows(
    found: list[dict[str, Any]], growth: tuple[float, float], replies: float
) -> list[bench.Row]:
    """The table: each population against the smallest with the same states."""
    table = []
    for states in dict.fromkeys(one["states"] for one in found):
        of = [one for one in found if one["states"] == states]
        few, many = (
            min(of, key=lambda one: int(one["clients"])),
            max(of, key=lambda one: int(one["clients"])),
        )
        what = f"{many['clients']:,} clients ({states}) against {few['clients']:,}, ms per round"
        ratio = many["round"] / few["round"]
        table.append(
            bench.Row(what, f"{few['round']:.1f}", f"{many['round']:.1f}", ratio, 1.3, False)
        )
        size = f"memory of {many['clients']:,} clients ({states}) beyond the model, MB"
        table.append(
            bench.Row(size, "1500", f"{many['memory']:.0f}", many["memory"] / 1500, 1.0, False)
        )
    largest = max(found, key=lambda one: int(one["clients"]))
    start = f"start of {largest['clients']:,} clients, s"
    table.append(
        bench.Row(start, "60", f"{largest['start']:.1f}", largest["start"] / 60, 1.0, False)
    )
    few_bytes, many_bytes = growth
    what = "checkpoint after ten times the rounds, kB"
    table.append(
        bench.Row(
            what,
            f"{few_bytes / 1e3:.1f}",
            f"{many_bytes / 1e3:.1f}",
            many_bytes / few_bytes,
            2.0,
            False,
        )
    )
    what = "replies of r = 10,000 that a server takes per minute"
    table.append(bench.Row(what, "10000", f"{replies:.0f}", replies / 10_000, 1.0))
    return table


def in_process(states: str, clients: int, rounds: int) -> dict[str, Any]:
    """One population in a process of its own, so that its memory is its own."""
    words = [sys.executable, __file__, "--one", states, str(clients), str(rounds)]
    return dict(json.loads(bench.output(words).splitlines()[-1]))


def short() -> list[bench.Row]:
    """For `make bench`."""
    found = [in_process("disk", clients, 15) for clients in (1000, 100_000)]
    return rows(found, checkpoint_growth((50, 500)), replies_per_minute(100))


def main() -> None:
    """Measure, print and write the table."""
    parser = bench.arguments(__doc__)
    parser.add_argument(
        "--clients", type=int, nargs="+", default=[1000, 10_000, 100_000, 1_000_000]
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.one[0], int(given.one[1]), int(given.one[2]))))
        return
    if given.short:
        found = [in_process("disk", clients, 5) for clients in (100, 1000)]
        print(bench.table(rows(found, checkpoint_growth((50, 500)), replies_per_minute(20))))
        return
    OUT.mkdir(exist_ok=True)
    kept = OUT / "bench-population.jsonl"
    found = (
        [json.loads(line) for line in kept.read_text("utf-8").splitlines()] if kept.exists() else []
    )
    for states in STATES:
        for clients in given.clients:
            too_many = states == "memory" and clients > IN_MEMORY
            if not too_many and not any(
                (one["states"], one["clients"]) == (states, clients) for one in found
            ):
                found.append(in_process(states, clients, given.rounds))
                with kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(found[-1]) + "\n")
                print(found[-1], flush=True)
    text = bench.table(rows(found, checkpoint_growth((100, 10_000)), replies_per_minute()))
    (OUT / "bench-population.md").write_text(text + "\n", "utf-8")
    print(text)


if __name__ == "__main__":
    bench.start(main)
