"""Rounds per second of FedAvg, SCAFFOLD and SSF: fedspan, FedJAX, pfl-research, and a hand-written loop.

    python benchmarks/simulation.py [--peers out/peers/bin/python] [--threads 1] [--models mlp cnn]
                                    [--methods fedavg scaffold ssf] [--how loop batched pool] [--turns 7] [--warmup 3]

100 clients of 100 examples 1 × 28 × 28, 10 clients per round, batches of 20, one epoch of local steps; the MLP
784-128-10 and a CNN of two convolutions. `simulation_peers.py` says how FedJAX and pfl are installed, apart from
fedspan. Without them their columns are empty. `--how` also times the ways of simulating that fedspan chooses from.
`--warmup` is the number of rounds before the first that is timed: SSF's correction is off in the first 179 on the MLP.

All contestants take turns, for about a third of a second each. A table holds their best turns: by CPU time with one
thread, which other programs on the machine disturb little, and by wall time with more. Writes out/bench-simulation.md.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import bench
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from simulation_peers import BATCH, CLIENTS, COHORT, EXAMPLES, LR, STEPS, Go, data, model_of, timed
from torch import nn

from fedspan.core.config import Engine, Settings, Simulate
from fedspan.core.method import Method
from fedspan.engine.loop import Loop
from fedspan.engine.simulator import Simulator
from fedspan.methods import SSF, FedAvg, Scaffold
from fedspan.nn.client_data import as_client_data
from fedspan.nn.problem import TorchProblem
from fedspan.nn.projection_rules import projection_rules

ROOT = Path(__file__).parents[1]
PEERS = os.environ.get("PEERS", "out/peers/bin/python")
TURN = 0.3  # seconds
METHODS: dict[str, Method] = {
    "fedavg": FedAvg(lr=LR, local_steps=STEPS),
    "scaffold": Scaffold(lr=LR, local_steps=STEPS),
    "ssf": SSF(rank=0.1, lr=LR, local_steps=STEPS),
}
TITLES = {"fedavg": "FedAvg", "scaffold": "SCAFFOLD", "ssf": "SSF at ρ = 0.1"}
WANTED = {"mlp": 1.4, "cnn": 1.5}  # of FedJAX's rounds per second


def plain(model: nn.Module, clients: list[Any], scaffold: bool) -> Go:
    """A loop as a researcher writes it: load, step with torch.optim, average."""
    rng = np.random.default_rng(0)
    params = list(model.parameters())
    x = [p.detach().clone() for p in params]
    c = [torch.zeros_like(p) for p in params]
    own = {i: [torch.zeros_like(p) for p in params] for i in range(CLIENTS)} if scaffold else {}

    def one_round() -> None:
        total = [torch.zeros_like(p) for p in params]
        change = [torch.zeros_like(p) for p in params]
        for i in rng.choice(CLIENTS, COHORT, replace=False):
            with torch.no_grad():
                for p, value in zip(params, x, strict=True):
                    p.copy_(value)
            optimizer = torch.optim.SGD(params, LR)
            inputs, targets = clients[i]
            for part in torch.randperm(EXAMPLES).split(BATCH):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs[part]), targets[part]).backward()
                if scaffold:
                    for p, mine, mean in zip(params, own[i], c, strict=True):
                        p.grad += mean - mine
                optimizer.step()
            with torch.no_grad():
                for k, p in enumerate(params):
                    total[k] += p - x[k]
                    if scaffold:
                        new = own[i][k] - c[k] + (x[k] - p) / (STEPS * LR)
                        change[k] += new - own[i][k]
                        own[i][k] = new
        for k in range(len(params)):
            x[k] = x[k] + total[k] / COHORT
            c[k] = c[k] + change[k] / CLIENTS

    return lambda rounds: [one_round() for _ in range(rounds)]


def ours(model: nn.Module, clients: list[Any], method: Method, how: Simulate = "auto") -> Go:
    """fedspan's own loop and simulator."""
    problem = TorchProblem(
        model,
        [as_client_data(one, f"client {i}") for i, one in enumerate(clients)],
        lambda m, b: F.cross_entropy(m(b[0]), b[1]),
        projection_rules(model),
        Settings(batch_size=BATCH),
    )
    loop = Loop(method, problem, Simulator(method, problem, Engine(simulate=how)), (0,), COHORT)

    def go(rounds: int) -> None:
        with torch.inference_mode():
            for _ in range(rounds):
                loop.step()

    return go


class Peer:
    """A contestant in a process of its own interpreter."""

    def __init__(self, name: str, model: str, method: str, threads: int) -> None:
        serve = [
            PEERS,
            str(Path(__file__).with_name("simulation_peers.py")),
            name,
            model,
            method,
            str(threads),
        ]
        env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        pipes: Any = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.DEVNULL,
            "text": True,
        }
        self.process = subprocess.Popen(serve, env=env, bufsize=1, **pipes)

    def times(self, rounds: int) -> tuple[float, float]:
        """(wall, CPU) seconds of some rounds."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(rounds, file=self.process.stdin)
        wall, cpu = self.process.stdout.readline().split()
        return float(wall), float(cpu)


class Here:
    """A contestant in this process."""

    def __init__(self, go: Go) -> None:
        self.go = go

    def times(self, rounds: int) -> tuple[float, float]:
        """(wall, CPU) seconds of some rounds."""
        return timed(self.go, rounds)


@contextlib.contextmanager
def contestants(
    model: str, method: str, threads: int, how: Sequence[Simulate] = ()
) -> Iterator[dict[str, Any]]:
    """Who takes part, by name."""
    clients = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in data()]
    found: dict[str, Any] = {}
    if method != "ssf":
        found["plain loop"] = Here(plain(model_of(model), clients, method == "scaffold"))
    if method != "ssf" and Path(PEERS).exists():
        found |= {name: Peer(name, model, method, threads) for name in ("FedJAX", "pfl")}
    found["fedspan"] = Here(ours(model_of(model), clients, METHODS[method]))
    found |= {
        f"fedspan, {way}": Here(ours(model_of(model), clients, METHODS[method], way)) for way in how
    }
    yield found
    for one in found.values():
        if isinstance(one, Peer):
            one.process.communicate()


def rates(found: dict[str, Any], turns: int, by_cpu: bool, warmup: int = 3) -> dict[str, float]:
    """Rounds per second of the best turn of each contestant."""
    sizes, best = {}, dict.fromkeys(found, float("inf"))
    for name, one in found.items():
        one.times(warmup)  # compiles, fills caches
        sizes[name] = max(1, round(TURN / (one.times(2)[by_cpu] / 2)))
    for _ in range(turns):
        for name, one in found.items():
            best[name] = min(best[name], one.times(sizes[name])[by_cpu] / sizes[name])
    return {name: 1 / seconds for name, seconds in best.items()}


def measured(
    model: str,
    method: str,
    turns: int,
    threads: int = 1,
    how: Sequence[Simulate] = (),
    warmup: int = 3,
) -> dict[str, float]:
    """Rounds per second of all contestants, after `warmup` rounds."""
    torch.set_num_threads(threads)
    with contestants(model, method, threads, how) as found:
        return rates(found, turns, threads == 1, warmup)


def short(turns: int = 4) -> list[bench.Row]:
    """For `make bench`."""
    rows, averaging = [], 0.0
    for model, method in (("mlp", "fedavg"), ("mlp", "scaffold"), ("cnn", "fedavg")):
        found = measured(model, method, turns)
        averaging = averaging or found["fedspan"]
        for peer, wanted in (("FedJAX", WANTED[model]), ("plain loop", 1.0)):
            ratio = found["fedspan"] / found[peer] if peer in found else None
            figure = f"{peer} {found[peer]:.1f}" if peer in found else peer
            what = f"{TITLES[method]} on the {model.upper()}, rounds per CPU second"
            rows.append(bench.Row(what, figure, f"{found['fedspan']:.1f}", ratio, wanted))
    inside = measured("mlp", "ssf", turns)["fedspan"]
    what = f"{TITLES['ssf']} on the MLP, rounds per CPU second"
    rows.append(
        bench.Row(what, f"its own FedAvg {averaging:.1f}", f"{inside:.1f}", inside / averaging, 1.0)
    )
    return rows


def main() -> None:
    """Measure and write the table."""
    parser = bench.arguments(__doc__)
    parser.add_argument("--peers", default=PEERS)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--models", nargs="+", default=["mlp", "cnn"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--how", nargs="*", default=[])
    parser.add_argument("--warmup", type=int, default=3)
    args = parser.parse_args()
    if args.short:
        print(bench.table(short(turns=1)))
        return
    globals()["PEERS"] = args.peers
    lines = [
        "| model | method | simulator | rounds/s | / FedJAX | / pfl | / plain loop |",
        "|---|---|---|---|---|---|---|",
    ]
    for model in args.models:
        for method in args.methods:
            found = measured(model, method, args.turns, args.threads, args.how, args.warmup)
            for kind, rate in found.items():
                ratios = [
                    f"{rate / found[one]:.2f}" if one in found else ""
                    for one in ("FedJAX", "pfl", "plain loop")
                ]
                lines.append(
                    f"| {model} | {TITLES[method]} | {kind} | {rate:.1f} | {' | '.join(ratios)} |"
                )
                print(lines[-1], flush=True)
    (ROOT / "out").mkdir(exist_ok=True)
    (ROOT / "out" / "bench-simulation.md").write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    bench.start(main)
