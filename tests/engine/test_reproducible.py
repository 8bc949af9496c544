"""The same call gives the same bits: under load, with any clock, hash seed, number of jobs and way to resume."""

from __future__ import annotations

import concurrent.futures
import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedspan


def test_runs_with_dropout_in_threads_are_those_of_one_thread() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 2))
    x = torch.randn(40, 4)
    clients: list[Any] = [(x, (x[:, 0] > 0).long())] * 3

    def losses(_: int) -> list[float]:
        model = copy.deepcopy(net)
        result = fedspan.fit(
            model, clients, method={"name": "fedavg", "lr": 0.1}, rounds=8, progress=False
        )
        return [line["training_loss"] for line in result.history]

    alone = losses(0)
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        assert list(threads.map(losses, range(4))) == [alone] * 4


DATA = """
import sys, time, random, json, torch
from torch import nn
import fedspan
from fedspan.methods import SSF, FedAvg, Scaffold

if jumps := float(sys.argv[1]):  # a clock that goes by leaps
    now, leap = [0.0], random.Random(0).expovariate

    def clock():
        now[0] += leap(1 / jumps)
        return now[0]

    time.perf_counter = time.monotonic = time.time = clock

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 3))

g = torch.Generator().manual_seed(1)
centers = 2 * torch.randn(3, 40, generator=g)
def client(skew):
    y = (torch.randint(0, 2, (60,), generator=g) + skew) % 3
    return centers[y] + torch.randn(60, 40, generator=g), y
clients, test = [client(i) for i in range(8)], client(1)

def shown(lines):
    bits = lambda v: v.hex() if isinstance(v, float) else v
    return [{k: bits(v) for k, v in one.items() if k not in ("seconds", "checksum")} for one in lines]

"""
FIT = """
out = {}
for name, model, method in (
    ("batched", net(), SSF(rank=0.3)),
    ("loop", nn.Sequential(net(), nn.Dropout(0.3)), SSF(rank=0.3, lr=0.1)),
    ("kept on disk", net(), Scaffold(lr=0.1)),
):
    engine = fedspan.Engine(states_dir=f"{sys.argv[2]}/states") if name == "kept on disk" else fedspan.Engine()
    result = fedspan.fit(
        model, clients, method=method, rounds=24, clients_per_round=5, batch_size=20, test=test, eval_every=3,
        engine=engine, progress=False, run_dir=f"{sys.argv[2]}/{name}",
    )
    out[name] = [shown(lines) for lines in result.runs]
    out[name].append([value.double().sum().item().hex() for value in result.model.state_dict().values()])
print(json.dumps(out))
"""
COMPARE = """
from pathlib import Path
if __name__ == "__main__":
    found = fedspan.compare(
        {"SSF": SSF(rank=0.3), "FedAvg": FedAvg(lr=0.1)}, net(), clients, rounds=12, seeds=2, clients_per_round=5,
        batch_size=20, test=test, run_dir=sys.argv[2], jobs=int(sys.argv[3]), progress=False,
    )
    histories = {}
    for path in sorted(Path(sys.argv[2]).rglob("history.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        histories[str(path.relative_to(sys.argv[2]))] = shown([one for one in lines if "round" in one])
    print(json.dumps(histories))
"""


def printed(
    code: str, folder: Path, leaps: float = 0.0, hashes: str = "0", threads: str = "1", *more: str
) -> Any:
    """What a script prints in a process of its own."""
    script = folder.with_suffix(".py")
    script.write_text(DATA + code)
    env = {**os.environ, "PYTHONHASHSEED": hashes, "OMP_NUM_THREADS": threads}
    command = [sys.executable, script, str(leaps), folder, *more]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def busy() -> Iterator[None]:
    """A machine with other work."""
    spin = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield
    for one in spin:
        one.kill()
        one.wait()


@pytest.mark.slow
def test_a_run_does_not_depend_on_load_clock_or_hash_seed(tmp_path: Path, busy: None) -> None:
    """A clock that leaps makes every round look slow, and due for a checkpoint."""
    first = printed(FIT, tmp_path / "a")
    assert len(first["batched"][0]) > 5
    assert first == printed(FIT, tmp_path / "b", leaps=100.0, hashes="17")


def test_a_comparison_does_not_depend_on_the_number_of_jobs(tmp_path: Path) -> None:
    first = printed(COMPARE, tmp_path / "a", 0.0, "0", "1", "1")
    assert len(first) > 3
    assert first == printed(COMPARE, tmp_path / "b", 0.0, "23", "2", "2")
