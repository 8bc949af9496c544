"""Rounds per second of FedAvg and SCAFFOLD: fedspan, pfl-research (where installed), and a hand-written loop.

    python benchmarks/simulation.py [--seconds 6] [--threads 1] [--models mlp cnn] [--how]

100 clients of 100 examples 1 × 28 × 28, 10 clients a round, batches of 20, one epoch of local steps; the MLP 784-128-10
and a CNN of two convolutions. All kinds take turns for `--seconds` each, in several short spells, and ratios are of
the medians of the spells. `--how` times every way of simulating that fedspan can choose from. Writes
out/bench-simulation.md.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from fedspan.core.config import Settings
from fedspan.core.method import Method
from fedspan.engine.loop import Loop
from fedspan.engine.simulator import Simulate, Simulator
from fedspan.methods import FedAvg, Scaffold
from fedspan.nn.client_data import as_client_data
from fedspan.nn.problem import TorchProblem
from fedspan.nn.projection_rules import projection_rules

ROOT = Path(__file__).parents[1]
CLIENTS, EXAMPLES, COHORT, BATCH, LR = 100, 100, 10, 20, 0.05
STEPS, SPELLS = EXAMPLES // BATCH, 7
Go = Callable[[int], Any]  # run so many rounds


def model_of(name: str) -> nn.Sequential:
    """The networks of the comparison."""
    torch.manual_seed(0)
    if name == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1568, 10),
    )  # fmt: skip


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Random examples; only their shapes matter here."""
    torch.manual_seed(1)
    return [(torch.randn(EXAMPLES, 1, 28, 28), torch.randint(0, 10, (EXAMPLES,))) for _ in range(CLIENTS)]


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


def ours(model: nn.Module, clients: list[Any], scaffold: bool, how: Simulate = "auto") -> Go:
    """fedspan's own loop and simulator."""
    problem = TorchProblem(
        model,
        [as_client_data(one, f"client {i}") for i, one in enumerate(clients)],
        lambda m, b: F.cross_entropy(m(b[0]), b[1]),
        projection_rules(model),
        Settings(batch_size=BATCH),
    )
    kind = Scaffold if scaffold else FedAvg
    method: Method[Any, Any, Any, Any] = kind(lr=LR, local_steps=STEPS)
    clients_end = Simulator(method, problem, simulate=how, rounds=10**6)
    loop = Loop(method, problem, clients_end, (0,), COHORT)

    def go(rounds: int) -> None:
        with torch.inference_mode():
            for _ in range(rounds):
                loop.step()

    return go


def pfl(model: nn.Module, clients: list[Any], scaffold: bool) -> Go | None:
    """pfl-research's simulated backend, without evaluation; None where it is not installed."""
    try:
        from pfl.aggregate.simulate import SimulatedBackend
    except ImportError:
        return None
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.algorithm.scaffold import SCAFFOLD, SCAFFOLDParams
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.user_state import InMemoryUserStateStorage
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    logging.disable(logging.WARNING)
    model.loss = lambda x, y, **_: F.cross_entropy(model(x), y)  # type: ignore[assignment]
    model.metrics = lambda *_: {}  # type: ignore[assignment]
    users = FederatedDataset(
        lambda i: Dataset(raw_data=clients[i], user_id=str(i)), lambda: int(np.random.default_rng().integers(CLIENTS))
    )
    backend = SimulatedBackend(training_data=users, val_data=None)
    wrapped = PyTorchModel(model, torch.optim.SGD, torch.optim.SGD(model.parameters(), 1.0))
    training = NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LR, local_batch_size=BATCH)
    storage = InMemoryUserStateStorage()

    def go(rounds: int) -> None:
        plan: dict[str, Any] = {"central_num_iterations": rounds, "evaluation_frequency": 10**9}
        plan |= {"train_cohort_size": COHORT, "val_cohort_size": None}
        own = {"population": CLIENTS, "use_gradient_as_control_variate": False, "user_state_storage": storage}
        params = SCAFFOLDParams(**plan, **own) if scaffold else NNAlgorithmParams(**plan)
        algorithm = SCAFFOLD() if scaffold else FederatedAveraging()
        algorithm.run(params, backend, wrapped, training, send_metrics_to_platform=False)

    return go


def compare(kinds: dict[str, Go], seconds: float) -> dict[str, float]:
    """Median rounds per second of each kind; they take turns in spells of about the same length."""
    sizes = {}
    for name, go in kinds.items():
        go(3)
        began = time.perf_counter()
        go(3)
        sizes[name] = max(1, round(3 * seconds / SPELLS / (time.perf_counter() - began)))
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(SPELLS):
        for name, go in kinds.items():
            began = time.perf_counter()
            go(sizes[name])
            rates[name].append(sizes[name] / (time.perf_counter() - began))
    return {name: statistics.median(found) for name, found in rates.items()}


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--models", nargs="+", default=["mlp", "cnn"])
    parser.add_argument("--how", nargs="*", default=[])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clients, lines = (
        data(),
        ["| model | method | simulator | rounds/s | / plain loop | / pfl |", "|---|---|---|---|---|---|"],
    )
    for name in args.models:
        for scaffold in (False, True):
            fresh = [model_of(name) for _ in range(3 + len(args.how))]
            kinds: dict[str, Go | None] = {"plain loop": plain(fresh[0], clients, scaffold)}
            kinds["pfl"] = pfl(fresh[1], clients, scaffold)
            kinds["fedspan"] = ours(fresh[2], clients, scaffold)
            for model, how in zip(fresh[3:], args.how, strict=True):
                kinds[f"fedspan, {how}"] = ours(model, clients, scaffold, how)
            found = compare({kind: go for kind, go in kinds.items() if go is not None}, args.seconds)
            for kind, rate in found.items():
                against = [f"{rate / found[other]:.2f}" if other in found else "" for other in ("plain loop", "pfl")]
                method = "SCAFFOLD" if scaffold else "FedAvg"
                lines.append(f"| {name} | {method} | {kind} | {rate:.1f} | {against[0]} | {against[1]} |")
                print(lines[-1], flush=True)
    (ROOT / "out").mkdir(exist_ok=True)
    (ROOT / "out" / "bench-simulation.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
