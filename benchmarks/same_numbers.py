"""Compare the numbers of two checkouts: every method and option on a small problem, and every study at the smoke scale.

    git worktree add ../before COMMIT
    python benchmarks/same_numbers.py ../before                 # methods, in float64
    python benchmarks/same_numbers.py ../before --studies       # and studies, in the precision of their specs

Each checkout runs in a process of its own. A line per case has the largest relative difference of all numbers of the
two histories, and of the bytes that were sent. Settings are written as the earlier checkout writes them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

GAUSSIAN, COORDINATE = {"name": "gaussian", "rank": 3}, {"name": "coordinate", "rank": 0.5}
TOPK, RANDK = {"name": "topk", "k": 0.3}, {"name": "randk", "k": 0.3}
BITS = {"name": "qsgd", "levels": 7, "bucket": 10}
ADAMW = {"name": "adamw", "eps": 1e-3, "decay": 0.1}
CASES: list[dict[str, Any]] = [
    {"name": "fedavg"},
    {"name": "fedavg", "server_lr": 0.5, "momentum": 0.5, "schedule": "linear"},
    {"name": "fedavg", "optimizer": ADAMW, "warmup": 3},
    {"name": "fedprox", "mu": 2.0},
    {"name": "fedavgm", "server_momentum": 0.5, "server_lr": 0.7},
    {"name": "fedadam", "server_lr": 0.1, "beta1": 0.5, "tau": 0.1},
    {"name": "fedyogi"},
    {"name": "fedadagrad", "beta1": 0.5},
    {"name": "fedit", "rank": 3, "server_momentum": 0.5},
    {"name": "ffalora", "rank": 3, "server_lr": 0.7},
    {"name": "ffalora", "rank": 3, "extrapolate": True},
    {"name": "powersgd", "rank": 1, "server_lr": 0.7},
    {"name": "scaffold"},
    {"name": "scaffold", "correction": "tested", "server_momentum": 0.5},
    {"name": "scaffold", "extrapolate": True},
    {"name": "scaffold", "optimizer": ADAMW},
    {"name": "subavg", "projector": GAUSSIAN, "refresh": 3},
    {"name": "subavg", "projector": GAUSSIAN, "down_compressor": {"name": "topk", "k": 0.5}},
    {"name": "subavg", "projector": COORDINATE, "optimizer": ADAMW, "moments": "project"},
    {"name": "subavg", "projector": GAUSSIAN, "preconditioner": "rows", "server_momentum": 0.5},
    {"name": "ssf", "projector": GAUSSIAN, "correction": "always"},
    {"name": "ssf", "projector": GAUSSIAN},
    {"name": "ssf", "projector": GAUSSIAN, "control": "paper", "server_lr": 0.7},
    {"name": "ssf", "projector": {"name": "hadamard", "rank": 4}, "refresh": 3},
    {"name": "ssf", "projector": {"name": "cycle", "rank": 5}, "correction": "never"},
    {"name": "ssf", "projector": {"name": "identity"}, "correction": "always"},
    {"name": "ssf", "projector": COORDINATE, "server_momentum": 0.5, "beta": 0.5},
    {"name": "ssf", "projector": GAUSSIAN, "compressor": {"name": "qsgd", "levels": 7}},
    {"name": "ssf", "projector": GAUSSIAN, "compressor": {"name": "sign"}, "beta": 0.3},
    {"name": "ssf", "projector": GAUSSIAN, "momentum": 0.5, "extrapolate": True},
    {"name": "ssf", "projector": GAUSSIAN, "optimizer": ADAMW, "moments": "project", "refresh": 2},
    {
        "name": "ssf",
        "projector": GAUSSIAN,
        "preconditioner": "rows",
        "compressor": BITS | {"bucket": 3},
    },
    {"name": "fedsub", "projector": GAUSSIAN, "refresh": 5},
    {"name": "fedsub", "projector": GAUSSIAN, "variant": "stale", "refresh": 2, "momentum": 0.5},
    {"name": "compressed", "compressor": RANDK, "server_lr": 0.5},
    {"name": "ef", "compressor": {"name": "sign"}, "server_lr": 0.7},
    {"name": "ef21", "compressor": TOPK, "server_lr": 0.7},
    {"name": "qsparse"},
    {"name": "doublesqueeze", "compressor": {"name": "topk", "k": 0.3}},
    {"name": "scallion", "compressor": RANDK},
    {"name": "scallion", "compressor": BITS, "alpha": 0.5, "server_lr": 0.7},
    {"name": "scafcom", "compressor": TOPK, "beta": 0.4},
]
STUDIES = ["toy", "mnist", "cifar100", "nlp", "options", "preconditioner", "privacy", "bytes"]
ROUNDS = 40
METHODS = """
import json, sys, warnings
import fedspan
warnings.simplefilter("ignore")
translate = dict
if sys.argv[2]:
    sys.path.insert(0, sys.argv[2])
    from support.axes import by_axis as translate
found = []
for case in json.loads(sys.argv[1]):
    table = {"lr": 0.02, "local_steps": 3, **translate(case)}
    table["lr"] = 0.005 if "optimizer" in case else 0.02
    task = {"name": "regression", "clients": 7, "dim": 10, "outputs": 3, "samples": 12}
    spec = {"rounds": int(sys.argv[3]), "eval_every": 5, "batch_size": 4, "clients_per_round": 3, "dtype": "float64",
            "method": table, "task": task, "seed": 3}
    result = fedspan.run(spec, progress=False)
    keep = lambda row: {k: v for k, v in row.items() if isinstance(v, float | int) and k != "seconds"}
    found.append([keep(row) for row in result.runs[0]])
print(json.dumps(found))
"""


def histories(checkout: Path, axes: bool) -> list[list[dict[str, float]]]:
    """Run all cases in a checkout."""
    tests = str(Path(__file__).parents[1] / "tests") if axes else ""
    given = [sys.executable, "-c", METHODS, json.dumps(CASES), tests, str(ROUNDS)]
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(given, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    found: list[list[dict[str, float]]] = json.loads(done.stdout)
    return found


def study(checkout: Path, name: str, out: Path) -> dict[str, list[dict[str, float]]]:
    """Run a study at its smoke scale, and return the histories of its runs by their directory."""
    given = [
        sys.executable,
        "-m",
        "fedspan",
        "reproduce",
        name,
        "--scale",
        "smoke",
        "--out",
        str(out),
    ]
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
    subprocess.run(given, env=environment, capture_output=True, text=True, check=False)
    found = {}
    for path in sorted(out.rglob("history*.jsonl")):
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        found[str(path.parent.relative_to(out))] = [_numbers(row) for row in rows]
    return found


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    return {
        key: value
        for key, value in row.items()
        if isinstance(value, float | int) and key != "seconds"
    }


def difference(
    before: list[dict[str, float]], after: list[dict[str, float]]
) -> tuple[float, float]:
    """Return the largest relative difference of the numbers, and of the bytes."""
    if len(before) != len(after):
        return float("inf"), float("inf")
    worst = {True: 0.0, False: 0.0}
    for one, two in zip(before, after, strict=True):
        for key in one.keys() & two.keys():
            a, b = float(one[key]), float(two[key])
            off = 0.0 if a == b or (a != a and b != b) else abs(a - b) / max(abs(a), abs(b), 1e-300)
            worst["bytes" in key] = max(worst["bytes" in key], off)
    return worst[False], worst[True]


def main() -> None:
    """Print a line per case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path, help="the earlier checkout")
    parser.add_argument(
        "--studies", action="store_true", help="run the studies at the smoke scale too"
    )
    given = parser.parse_args()
    here = Path(__file__).parents[1]
    before, after = histories(given.before, axes=False), histories(here, axes=True)
    for case, one, two in zip(CASES, before, after, strict=True):
        off, sent = difference(one, two)
        own = {key: value for key, value in case.items() if key != "name"}
        print(f"{off:8.1e} {sent:8.1e}  {case['name']} {json.dumps(own) if own else ''}")
    for name in STUDIES if given.studies else ():
        with tempfile.TemporaryDirectory() as folder:
            old = study(given.before, name, Path(folder) / "before")
            new = study(here, name, Path(folder) / "after")
        same = [difference(old[key], new[key]) for key in old.keys() & new.keys()]
        worst = max((off for off, _ in same), default=float("nan"))
        print(f"{worst:8.1e}           study {name}: {len(same)} of {len(old)} runs are in both")


if __name__ == "__main__":
    main()
