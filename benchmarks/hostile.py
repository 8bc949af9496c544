"""Accuracy with 20 % hostile clients, by aggregator: MNIST by writer, SSF and FedAvg.

    python benchmarks/hostile.py [--seeds 3] [--rounds 80] [--only ssf]

539 writers, of whom 108 are hostile; 25 take part per round. An MLP 784-128-10, ten local steps on batches of 16.
SSF renews its controls by rule = "paper" where there is an aggregator, which needs it. There is a table per method,
with the accuracy on digits of 297 other writers in per cent: mean of the last three evaluations, mean over the seeds.
Every run is a line of out/bench-hostile.jsonl as soon as it ends; a run that is there is not run again. The tables are
out/bench-hostile.md.

    none         no attack, the same clients
    sign flip    a hostile client sends −1 times its reply
    scaling      a hostile client sends −10 times its reply
    label flip   a hostile client trains on labels 9 − y
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import bench
import numpy as np
import torch
from attacks import hostile, times

import fedspan
from fedspan.nn.models import mlp

OUT = Path(__file__).parents[1] / "out"
SHARE = 0.2
METHODS: dict[str, dict[str, Any]] = {
    "ssf": {"name": "ssf", "rank": 0.1, "lr": 0.3, "local_steps": 10},
    "ssf, always": {
        "name": "ssf",
        "drift": {"correction": "always"},
        "rank": 0.1,
        "lr": 0.3,
        "local_steps": 10,
    },
    "fedavg": {"name": "fedavg", "lr": 0.1, "local_steps": 10},
}
AGGREGATORS: dict[str, dict[str, Any]] = {
    "mean": {"name": "mean"},
    "norm_bound": {"name": "norm_bound"},
    "trimmed_mean, share 0.3": {"name": "trimmed_mean", "share": 0.3},
    "median": {"name": "median"},
    "geometric_median": {"name": "geometric_median"},
    "krum, keep 0.6": {"name": "krum", "hostile": 0.3, "keep": 0.6},
    "centered_clipping": {"name": "centered_clipping"},
}
ATTACKS = {"none": 1.0, "sign flip": -1.0, "scaling": -10.0, "label flip": 1.0}


def data(attack: str, liars: set[int]) -> tuple[list[Any], Any]:
    """(clients, test) as tensors; hostile clients may have wrong labels."""
    train, test = fedspan.data.mnist()
    assert train.owner is not None
    clients = []
    for number, part in enumerate(fedspan.data.natural(train.owner).values()):
        x, y = torch.from_numpy(train.x[part]) / 255.0, torch.from_numpy(train.y[part])
        clients.append((x, 9 - y if attack == "label flip" and number in liars else y))
    return clients, (torch.from_numpy(test.x) / 255.0, torch.from_numpy(test.y))


def run(method: str, aggregator: str, attack: str, seed: int, rounds: int) -> dict[str, Any]:
    """One run, and what came of it."""
    liars = set(np.random.default_rng(seed).permutation(539)[: round(SHARE * 539)].tolist())
    clients, test = data(attack, liars)
    torch.manual_seed(seed)
    began, factor, own = time.process_time(), ATTACKS[attack], METHODS[method]
    if own["name"] == "ssf" and aggregator != "mean":
        own = own | {"drift": {**own.get("drift", {}), "rule": "paper"}}
    with hostile(liars, times(factor)) if factor != 1 else contextlib.nullcontext():
        result = fedspan.fit(
            mlp((1, 28, 28), 10), clients, method=own, rounds=rounds, batch_size=16, clients_per_round=25,
            test=test, metrics=["accuracy"], eval_every=5, seed=seed, progress=False,
            participation={"weights": "uniform", "aggregator": AGGREGATORS[aggregator]},
        )  # fmt: skip
    accuracy = float(
        np.mean([line.get("accuracy") or float("nan") for line in result.history[-3:]])
    )
    left_out = sum(
        "left out" in event for line in result.history for event in line.get("events", ())
    )
    key = {
        "method": method,
        "aggregator": aggregator,
        "attack": attack,
        "seed": seed,
        "rounds": rounds,
    }
    seconds = round(time.process_time() - began, 1)
    return key | {
        "accuracy": accuracy,
        "status": result.status,
        "left_out": left_out,
        "cpu_seconds": seconds,
    }


def accuracies(lines: list[dict[str, Any]]) -> str:
    """Accuracy in per cent: a table per method, a row per aggregator, a column per attack."""
    text = ""
    for method in METHODS:
        text += f"| {method} | {' | '.join(ATTACKS)} |\n|---|{'---|' * len(ATTACKS)}\n"
        for aggregator in AGGREGATORS:
            runs = [chosen(lines, method, aggregator, attack) for attack in ATTACKS]
            cells = [
                mean([None if diverged(run) else 100 * run["accuracy"] for run in own], 1)
                for own in runs
            ]
            text += f"| {aggregator} | {' | '.join(cells)} |\n"
        text += "\n"
    return text


def chosen(lines: list[dict[str, Any]], *key: str) -> list[dict[str, Any]]:
    """The runs of a method, an aggregator and an attack, one per seed."""
    return [line for line in lines if (line["method"], line["aggregator"], line["attack"]) == key]


def diverged(run: dict[str, Any]) -> bool:
    """Whether a run ended early with a loss that is not finite."""
    return bool(run["status"].startswith("diverged"))


def mean(values: list[float | None], digits: int) -> str:
    """The mean over the seeds; None is a run that diverged."""
    there = [value for value in values if value is not None]
    if len(there) < len(values):
        return "diverged" if not there else f"{len(values) - len(there)} of {len(values)} diverged"
    return f"{np.mean(there):.{digits}f}" if there else ""


def main() -> None:
    """Runs what is missing and writes the table."""
    parse = bench.arguments(__doc__)
    parse.add_argument("--seeds", type=int, default=3)
    parse.add_argument("--rounds", type=int, default=80)
    parse.add_argument("--only", choices=METHODS)
    given = parse.parse_args()
    if given.short:
        print(run("ssf", "median", "scaling", 0, rounds=20))
        return
    OUT.mkdir(exist_ok=True)
    path = OUT / "bench-hostile.jsonl"
    lines = (
        [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    )
    known = {
        tuple(line[key] for key in ("method", "aggregator", "attack", "seed", "rounds"))
        for line in lines
    }
    for seed in range(given.seeds):
        for method in [given.only] if given.only else METHODS:
            for aggregator in AGGREGATORS:
                for attack in ATTACKS:
                    if (method, aggregator, attack, seed, given.rounds) in known:
                        continue
                    lines.append(run(method, aggregator, attack, seed, given.rounds))
                    with path.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(lines[-1]) + "\n")
                    print(lines[-1], flush=True)
    lines = [
        line for line in lines if line["rounds"] == given.rounds and line["seed"] < given.seeds
    ]
    text = accuracies(lines)
    (OUT / "bench-hostile.md").write_text(text, "utf-8")
    print(text)


if __name__ == "__main__":
    bench.start(main)
