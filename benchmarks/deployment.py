"""A network of 20 million numbers over a real SuperLink and two SuperNodes: seconds, bytes and memory.

python benchmarks/deployment.py --rounds 5
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import bench

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "flower"))
from cluster import Cluster

MODULE = "fedspan_flower.wide"  # each node names it in its own config
KINDS = (
    "flower-superlink",
    "flower-supernode",
    "flower-superexec",
    "flwr-serverapp",
    "flwr-clientapp",
)


class Memory:
    """The largest resident size that any process of each kind has reached."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.peak = cluster, dict.fromkeys(KINDS, 0)
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            for kind in KINDS:
                for pid in self.cluster.living(kind):
                    self.peak[kind] = max(self.peak[kind], _peak(pid))
            time.sleep(0.3)


def _peak(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text("utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def spec(rounds: int, rank: float) -> str:
    """Changes of the app's spec."""
    task = f'{{name = "custom", module = "{MODULE}", clients = 2}}'
    method = f'{{name = "ssf", space = {{name = "coordinate", rank = {rank}}}, lr = 0.3, local_steps = 20}}'
    return f"rounds = {rounds}; eval_every = 1; task = {task}; method = {method}"


def show(out: Path, status: dict[str, Any], peak: dict[str, int]) -> None:
    """What the run came to."""
    rows = [json.loads(line) for line in (out / "history.jsonl").read_text("utf-8").splitlines()][
        1:
    ]
    lines = [json.loads(line) for line in (out / "audit.jsonl").read_text("utf-8").splitlines()]
    rounds = [line for line in lines if "rounds" in line]
    for row, one in zip(rows[1:], rounds, strict=True):
        sizes = "  ".join(f"{key} {one[key] / 1e6:.2f} MB" for key in ("up_bytes", "down_bytes"))
        print(
            f"round {row['round']}  {row['seconds']:.0f} s  accuracy {row['accuracy']:.3f}  {sizes}"
        )
    print("traffic as the SuperLink counts it:", json.dumps(status.get("network-traffic")))
    print(
        "disk of a client's state:",
        _mega(max(p.stat().st_size for p in out.parent.glob("states/*/*"))),
    )
    print(
        "disk of the server:", _mega(sum(p.stat().st_size for p in out.rglob("*") if p.is_file()))
    )
    for kind, size in peak.items():
        print(f"peak memory {kind:17} {_mega(size)}")


def _mega(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"


def main() -> None:
    """Start, run, show, stop."""
    parser = bench.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", type=float, default=0.1)
    given = parser.parse_args()
    if given.short:
        given.rounds = 1
    with (
        tempfile.TemporaryDirectory() as place,
        Cluster(Path(place), nodes=2, module=MODULE) as cluster,
    ):
        out, memory = Path(place) / "out", Memory(cluster)
        status = cluster.wait(
            cluster.run(run_dir=str(out), set=spec(given.rounds, given.rank)), 1800
        )
        if status["status"] != "finished:completed":
            raise SystemExit(f"the run ended as {status['status']}: {status.get('status-details')}")
        show(out, status, memory.peak)


if __name__ == "__main__":
    bench.start(main)
