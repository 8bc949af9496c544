"""Memory of large models: a transformer of 124 million numbers over a SuperLink and two SuperNodes; simulations.

    python benchmarks/large_model.py [--method ssf] [--rounds 3]      the deployment: 10 GB of memory and of disk
    python benchmarks/large_model.py --simulator [--width 3500]       simulations of 100 million numbers

The transformer has the shape of GPT-2 small and random weights, float32; clients train on one text of 32 tokens per
step. Memory is the peak of a process's own memory (RssAnon; pages that are mapped from a file of states can be dropped
at any time) above that of the same process with a tiny transformer, as a multiple of the model's bytes. A simulation is
a process of its own, with 4 clients of which all take part; the states of SSF's clients count as part of it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bench
import torch
from torch import nn

ROOT = Path(__file__).parents[1]
STEADY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}
WORDS, TOKENS, CLIENTS = 90, 32, 2
METHODS = {"ssf": "rank = 0.1, ", "fedavg": ""}
KINDS = {"server": "flwr-serverapp", "client": "flwr-clientapp"}
SERVER, CLIENT, SIMULATION = 4.0, 3.0, 5.0  # bounds, in models
MODULE = """import sys
sys.path.insert(0, {here!r})
from large_model import data, gpt2, test

def model():
    return gpt2({sizes})
"""


def gpt2(**sizes: int) -> nn.Module:
    """A transformer of GPT-2 small's shape, or with other sizes."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(**sizes))


def data(client: int) -> dict[str, torch.Tensor]:
    """Texts of random tokens."""
    tokens = torch.randint(WORDS, (8, TOKENS), generator=torch.Generator().manual_seed(client))
    return {"input_ids": tokens, "labels": tokens}


def test() -> dict[str, torch.Tensor]:
    """A few texts more."""
    return {name: tokens[:2] for name, tokens in data(CLIENTS).items()}


def status(pid: int | str, key: str) -> int:
    """Bytes that the system counts for a process; 0 where it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text("utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), 0)


@contextmanager
def watched(cluster: Any) -> Iterator[dict[str, int]]:
    """The largest own memory that any process of each kind reaches meanwhile."""
    peak, over = dict.fromkeys(KINDS, 0), threading.Event()

    def watch() -> None:
        looked, pids = 0.0, dict[str, list[int]]()
        while not over.wait(0.02):
            if time.monotonic() - looked > 0.5:
                pids, looked = (
                    {kind: cluster.living(word) for kind, word in KINDS.items()},
                    time.monotonic(),
                )
            for kind, own in pids.items():
                peak[kind] = max([peak[kind], *(status(pid, "RssAnon") for pid in own)])

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield peak
    over.set()
    thread.join()


def run(place: Path, name: str, method: str, rounds: int, sizes: str) -> dict[str, int]:
    """A run of a transformer of some size: the peak of each kind of process."""
    from cluster import Cluster

    module = place / f"{name}.py"
    module.write_text(MODULE.format(here=str(Path(__file__).parent), sizes=sizes), "utf-8")
    task = f'{{name = "custom", module = {json.dumps(str(module))}, clients = {CLIENTS}}}'
    chosen = f'{{name = "{method}", {METHODS[method]}lr = 0.01, local_steps = 2}}'
    changes = f"rounds = {rounds}; eval_every = 1; batch_size = 1; task = {task}; method = {chosen}"
    cluster = Cluster(
        place / f"{name}-cluster", nodes=CLIENTS, module=str(module)
    )  # nodes choose what they import
    cluster.env |= STEADY
    with cluster, watched(cluster) as peak:
        ended = cluster.wait(
            cluster.run(run_dir=str(place / name), run_name=name, set=changes, timeout=1200.0), 2400
        )
    if ended["status"] != "finished:completed":
        raise SystemExit(f"the run ended as {ended['status']}: {ended.get('status-details')}")
    lines = [
        json.loads(line)
        for line in (place / name / "history.jsonl").read_text("utf-8").splitlines()
    ][1:]
    for line in lines:
        print(
            f"{name} round {line['round']}  {line['seconds']:.0f} s  loss {line['loss']:.4f}  {line.get('events', '')}"
        )
    return peak


def deployment(method: str, rounds: int) -> dict[str, float]:
    """Peak of the server's and of a client's process, in models above a tiny one."""
    sys.path.insert(0, str(ROOT / "examples" / "flower"))
    with tempfile.TemporaryDirectory() as folder:
        tiny = run(Path(folder), "tiny", method, 1, "n_layer=1, n_embd=64, n_head=2, vocab_size=97")
        large = run(Path(folder), "large", method, rounds, "")
    model = 4 * 124_439_808
    return {kind: (large[kind] - tiny[kind]) / model for kind in KINDS}


def simulate(method: str, width: int, layers: int, on_disk: bool) -> None:
    """Prints the peak of a simulation in this process, in models."""
    import fedspan

    def network(width: int, layers: int) -> nn.Module:
        inner = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
        return nn.Sequential(*inner, nn.Linear(width, 10))

    def fit(width: int, layers: int) -> int:
        model = network(width, layers)
        clients = [(torch.randn(4, width), torch.arange(4)) for _ in range(4)]
        chosen: Any = {"name": method, "lr": 0.01, "local_steps": 2} | (
            {"rank": 0.1} if method == "ssf" else {}
        )
        with tempfile.TemporaryDirectory() as folder:
            engine = fedspan.Engine(states_dir=folder if on_disk else None)
            fedspan.fit(
                model,
                clients,
                method=chosen,
                rounds=3,
                test=clients[0],
                engine=engine,
                progress=False,
                device="cpu",
            )
        return sum(p.numel() for p in model.parameters()) * 4

    fit(16, 2)
    before = status("self", "VmRSS")
    Path("/proc/self/clear_refs").write_text("5", "utf-8")  # the peak is what it is now
    model = fit(width, layers)
    print((status("self", "VmHWM") - before) / model)


def simulated(method: str, width: int, layers: int = 8, on_disk: bool = False) -> float:
    """The same in a process of its own."""
    command = [
        sys.executable,
        __file__,
        "--simulate",
        method,
        "--width",
        str(width),
        "--layers",
        str(layers),
    ]
    command += ["--on-disk"] if on_disk else []
    return float(bench.output(command, env={**os.environ, **STEADY}))


def rows(width: int) -> list[bench.Row]:
    """Simulations of a network."""
    found = {method: simulated(method, width) for method in METHODS}
    found["ssf with states on disk"] = simulated("ssf", width, on_disk=True)
    what = f"simulation of {8 * width**2 / 1e6:.0f} M numbers, 4 clients: peak memory in models"
    return [
        bench.Row(
            f"{method}, {what}", "", f"{ratio:.2f}", ratio, SIMULATION, larger_is_better=False
        )
        for method, ratio in found.items()
    ]


def short() -> list[bench.Row]:
    """For `make bench`."""
    return rows(1024)


def main() -> None:
    """Measure what is asked for."""
    parser = bench.arguments(__doc__)
    parser.add_argument("--method", choices=METHODS, default="ssf")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--simulator", action="store_true")
    parser.add_argument("--width", type=int, default=3500)
    parser.add_argument("--layers", type=int, default=8, help=argparse.SUPPRESS)
    parser.add_argument("--simulate", help=argparse.SUPPRESS)
    parser.add_argument("--on-disk", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.short:
        print(bench.table(rows(512)))
        return
    torch.set_num_threads(1)
    if given.simulate:
        simulate(given.simulate, given.width, given.layers, given.on_disk)
    elif given.simulator:
        print(bench.table(rows(given.width)))
    else:
        found = deployment(given.method, given.rounds)
        for kind, most in (("server", SERVER), ("client", CLIENT)):
            print(f"peak memory of the {kind}: {found[kind]:.2f} models (at most {most:g})")


if __name__ == "__main__":
    bench.start(main)
