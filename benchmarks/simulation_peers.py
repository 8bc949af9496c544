"""The problem of benchmarks/simulation.py, and how FedJAX and pfl-research train on it.

They are no dependency of fedspan and run in an interpreter of their own, one process per contestant:

    python3.11 -m venv out/peers
    out/peers/bin/pip install torch==2.13.0 fedjax==0.0.17 jax==0.10.2 pfl==0.6.0

`serve` is that process. It reads a number of rounds per line and answers with the (wall, CPU) seconds they took.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

CLIENTS, EXAMPLES, COHORT, BATCH, LR = 100, 100, 10, 20, 0.05
STEPS = EXAMPLES // BATCH
Go = Callable[[int], Any]  # run so many rounds
Arrays = list[tuple[np.ndarray, np.ndarray]]


def data() -> Arrays:
    """(images, labels) of each client; random, because only the shapes matter here."""
    rng = np.random.default_rng(1)
    shape = EXAMPLES, 1, 28, 28
    return [
        (rng.standard_normal(shape, np.float32), rng.integers(0, 10, EXAMPLES))
        for _ in range(CLIENTS)
    ]


def model_of(name: str) -> Any:
    """The networks of the comparison, in torch."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    if name == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1568, 10),
    )  # fmt: skip


def fedjax(name: str, method: str) -> Go:
    """FedJAX: its own federated averaging; SCAFFOLD is written for its `for_each_client`, as it has none."""
    import jax
    import jax.numpy as jnp
    from jax.example_libraries import stax

    jax.tree_map = jax.tree_util.tree_map  # taken out of JAX after FedJAX's last release
    import fedjax
    from fedjax.algorithms import fed_avg

    def conv(width: int) -> Any:
        return stax.GeneralConv(("NHWC", "HWIO", "NHWC"), width, (5, 5), padding="SAME")

    def block(width: int) -> tuple[Any, ...]:
        return conv(width), stax.Relu, stax.MaxPool((2, 2), strides=(2, 2))

    layers = (
        (stax.Flatten, stax.Dense(128), stax.Relu)
        if name == "mlp"
        else (*block(16), *block(32), stax.Flatten)
    )
    model = fedjax.create_model_from_stax(
        *stax.serial(*layers, stax.Dense(10)),
        (-1, 28, 28, 1),
        lambda batch, outputs: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], outputs),
    )
    sets = [fedjax.ClientDataset({"x": x.transpose(0, 2, 3, 1), "y": y}) for x, y in data()]
    batches = fedjax.ShuffleRepeatBatchHParams(batch_size=BATCH, num_epochs=1)
    gradient, rng = fedjax.model_grad(model), np.random.default_rng(0)
    params, key = model.init(jax.random.PRNGKey(0)), jax.random.PRNGKey(1)
    sgd = fedjax.optimizers.sgd
    averaging = fed_avg.federated_averaging(gradient, sgd(LR), sgd(1.0), batches)
    state = averaging.init(params)
    zeros = jax.tree_util.tree_map(jnp.zeros_like, params)
    server = {"x": params, "c": zeros}
    own = dict.fromkeys(range(CLIENTS), zeros)

    def tree(f: Any, *of: Any) -> Any:
        return jax.tree_util.tree_map(f, *of)

    def begin(shared: Any, mine: Any) -> Any:
        return {"y": shared["x"], "u": tree(jnp.subtract, shared["c"], mine["c"]), "c": mine["c"]}

    def step(here: Any, batch: Any) -> Any:
        y = tree(
            lambda y, g, u: y - LR * (g + u), here["y"], gradient(here["y"], batch, key), here["u"]
        )
        return {**here, "y": y}

    def end(shared: Any, here: Any) -> Any:
        dy = tree(jnp.subtract, here["y"], shared["x"])
        dc = tree(lambda d, c: -d / (STEPS * LR) - c, dy, shared["c"])
        return {"dy": dy, "dc": dc, "c": tree(jnp.add, here["c"], dc)}

    each = fedjax.for_each_client(begin, step, end)

    @jax.jit
    def update(server: Any, dy: Any, dc: Any) -> Any:
        x = tree(lambda x, d: x + d / COHORT, server["x"], dy)
        return {"x": x, "c": tree(lambda c, d: c + d / CLIENTS, server["c"], dc)}

    @jax.jit
    def add(a: Any, b: Any) -> Any:
        return tree(jnp.add, a, b)

    def scaffold(ids: Any) -> None:
        nonlocal server
        dy = dc = zeros
        tasks = [(i, sets[i].shuffle_repeat_batch(batches), {"c": own[i]}) for i in ids]
        for i, out in each(server, tasks):
            own[i], dy, dc = out["c"], add(dy, out["dy"]), add(dc, out["dc"])
        server = update(server, dy, dc)

    def go(rounds: int) -> None:
        nonlocal state
        for _ in range(rounds):
            ids = rng.choice(CLIENTS, COHORT, replace=False).tolist()
            if method == "scaffold":
                scaffold(ids)
            else:
                state = averaging.apply(state, [(i, sets[i], key) for i in ids])[0]
        jax.block_until_ready(server["x"] if method == "scaffold" else state.params)

    return go


def pfl(name: str, method: str) -> Go:
    """pfl-research's simulated backend, without evaluation."""
    import torch
    import torch.nn.functional as F  # noqa: N812
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.algorithm.scaffold import SCAFFOLD, SCAFFOLDParams
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.user_state import InMemoryUserStateStorage
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    logging.disable(logging.WARNING)
    model, clients = model_of(name), [tuple(map(torch.from_numpy, one)) for one in data()]
    model.loss = lambda x, y, **_: F.cross_entropy(model(x), y)
    model.metrics = lambda *_: {}
    users = FederatedDataset(
        lambda i: Dataset(raw_data=clients[i], user_id=str(i)),
        lambda: int(np.random.default_rng().integers(CLIENTS)),
    )
    backend = SimulatedBackend(training_data=users, val_data=None)
    wrapped = PyTorchModel(model, torch.optim.SGD, torch.optim.SGD(model.parameters(), 1.0))
    training = NNTrainHyperParams(
        local_num_epochs=1, local_learning_rate=LR, local_batch_size=BATCH
    )
    storage = InMemoryUserStateStorage()

    def go(rounds: int) -> None:
        plan: dict[str, Any] = {"central_num_iterations": rounds, "evaluation_frequency": 10**9}
        plan |= {"train_cohort_size": COHORT, "val_cohort_size": None}
        own = {
            "population": CLIENTS,
            "use_gradient_as_control_variate": False,
            "user_state_storage": storage,
        }
        params = (
            SCAFFOLDParams(**plan, **own) if method == "scaffold" else NNAlgorithmParams(**plan)
        )
        algorithm = SCAFFOLD() if method == "scaffold" else FederatedAveraging()
        algorithm.run(params, backend, wrapped, training, send_metrics_to_platform=False)

    return go


def timed(go: Go, rounds: int) -> tuple[float, float]:
    """(wall, CPU) seconds of some rounds."""
    wall, cpu = time.perf_counter(), time.process_time()
    go(rounds)
    return time.perf_counter() - wall, time.process_time() - cpu


def serve(peer: str, name: str, method: str, threads: int) -> None:
    """Answers on a copy of standard output; what the libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    os.sched_setaffinity(
        0, sorted(os.sched_getaffinity(0))[:threads]
    )  # JAX has no other bound on its threads
    go = {"FedJAX": fedjax, "pfl": pfl}[peer](name, method)
    for line in sys.stdin:
        print(*timed(go, int(line)), file=answers)


if __name__ == "__main__":
    serve(*sys.argv[1:4], int(sys.argv[4]))
