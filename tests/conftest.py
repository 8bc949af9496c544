"""What the tests share: small problems, loops over them, and a transport that really packs every message."""

from __future__ import annotations

import dataclasses
import signal
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedspan.core import registry, wire
from fedspan.core.callback import Callback
from fedspan.core.config import Participation, Settings
from fedspan.core.method import Method, Round
from fedspan.core.objective import Problem
from fedspan.core.sync import SyncedDown
from fedspan.engine.loop import Loop, Replies
from fedspan.engine.simulator import Simulator
from fedspan.engine.worker import Replica, answer

torch.set_num_threads(1)

GAUSSIAN = {"name": "gaussian", "rank": 3}
TOPK, RANDK = {"name": "topk", "k": 0.3}, {"name": "randk", "k": 0.3}
QSGD = {"name": "qsgd", "levels": 7, "bucket": 10}
ADAMW = {"name": "adamw", "eps": 1e-3}  # an eps well above rounding, which a smaller one would scale up
# One or more settings of every registered method; a method without an entry fails the contract suite.
METHODS: dict[str, list[dict[str, Any]]] = {
    "fedavg": [
        {},
        {"server_lr": 0.5},
        {"momentum": 0.5, "schedule": "linear"},
        {"optimizer": ADAMW | {"decay": 0.1}},
    ],
    "fedprox": [
        {},
        {"mu": 2.0, "server_lr": 0.5, "optimizer": ADAMW},
        {"momentum": 0.5, "schedule": "step", "milestones": [0.1, 0.3], "warmup": 3},
    ],
    "fedavgm": [{}, {"server_momentum": 0.5, "server_lr": 0.7, "momentum": 0.5}, {"optimizer": ADAMW}],
    "fedadam": [{}, {"beta1": 0.5, "beta2": 0.9, "tau": 0.1, "server_lr": 0.1, "optimizer": ADAMW}],
    "fedyogi": [{}, {"optimizer": ADAMW}],
    "fedadagrad": [{}, {"beta1": 0.5, "optimizer": ADAMW}],
    "fedit": [
        {"rank": 3},
        {"rank": 0.3, "alpha": 2.0, "server_lr": 0.7, "momentum": 0.5},
        {"rank": 3, "optimizer": ADAMW | {"decay": 0.1}},
    ],
    "ffalora": [
        {"rank": 3},
        {"rank": 4, "alpha": 2.0, "others": "frozen", "server_lr": 0.7, "momentum": 0.5},
        {"rank": {"*": 1.0}, "schedule": "cosine"},
        {"rank": 3, "alpha": 2.0, "optimizer": ADAMW | {"decay": 0.1}},
    ],
    "powersgd": [{"rank": 1}, {"rank": 0.4, "server_lr": 0.7, "momentum": 0.5}, {"optimizer": ADAMW}],
    "scaffold": [
        {},
        {"uplink": "classic"},
        {"option": "I", "uplink": "classic"},
        {"momentum": 0.5},
        {"optimizer": ADAMW},
    ],
    "ssf": [
        {"projector": GAUSSIAN},
        {"projector": GAUSSIAN, "control": "paper", "server_lr": 0.7},
        {"projector": {"name": "coordinate", "rank": 0.3}, "refresh": 3},
        {"projector": {"name": "hadamard", "rank": 4}, "rank_boost": 2.0},
        {"projector": {"name": "identity"}},
        {"projector": GAUSSIAN, "momentum": 0.5, "schedule": "cosine"},
        {"projector": GAUSSIAN, "compressor": {"name": "qsgd", "levels": 7}},
        {"projector": GAUSSIAN, "compressor": {"name": "sign"}, "beta": 0.3},
        {"projector": {"name": "coordinate", "rank": 0.5}, "compressor": {"name": "topk", "k": 0.5}},
        {"projector": GAUSSIAN, "optimizer": ADAMW | {"decay": 0.1}},
        {"projector": {"name": "coordinate", "rank": 0.3}, "refresh": 3, "momentum": 0.5, "moments": "keep"},
        {"projector": GAUSSIAN, "refresh": 2, "optimizer": ADAMW, "moments": "project"},
    ],
    "subavg": [
        {"projector": GAUSSIAN},
        {"projector": {"name": "coordinate", "rank": 0.5}, "optimizer": ADAMW, "moments": "project"},
    ],
    "fedsub": [
        {"projector": GAUSSIAN},
        {"projector": GAUSSIAN, "variant": "stale", "refresh": 2},
        {"projector": {"name": "coordinate", "rank": 5}, "server_lr": 0.5, "refresh": 1, "momentum": 0.5},
    ],
    "compressed": [
        {},
        {"compressor": RANDK, "server_lr": 0.5, "optimizer": ADAMW},
        {"compressor": {"name": "natural"}, "momentum": 0.5},
    ],
    "ef": [
        {},
        {"compressor": {"name": "randk", "k": 5, "unbiased": False}, "server_lr": 0.7},
        {"compressor": {"name": "sign"}, "momentum": 0.5, "schedule": "linear"},
        {"optimizer": ADAMW},
    ],
    "ef21": [
        {"compressor": TOPK},
        {"compressor": {"name": "cast"}, "momentum": 0.5, "server_lr": 0.7},
        {"compressor": TOPK, "optimizer": ADAMW},
    ],
    "qsparse": [
        {},
        {"optimizer": ADAMW, "compressor": {"name": "compose", "outer": {"name": "natural"}, "inner": TOPK}},
    ],
    "doublesqueeze": [
        {},
        {"compressor": {"name": "qsgd", "levels": 31}, "server_lr": 0.7},
        {"compressor": {"name": "randk", "k": 0.3, "unbiased": False}, "momentum": 0.5},
        {"compressor": {"name": "identity"}, "optimizer": ADAMW},
    ],
    "scallion": [
        {"compressor": RANDK},
        {"compressor": QSGD, "alpha": 0.5, "server_lr": 0.7},
        {"compressor": {"name": "randk", "k": 4, "common": True}, "schedule": "cosine"},
        {"compressor": {"name": "identity"}},
    ],
    "scafcom": [{"compressor": TOPK}, {"compressor": {"name": "natural"}, "beta": 1.0, "server_lr": 0.7}],
}
SMALL = {
    "name": "regression",
    "clients": 7,
    "dim": 12,
    "outputs": 2,
    "samples": 9,
    "het": 1.0,
    "target_het": 1.0,
}


RUN: dict[str, Any] = {
    "rounds": 30,
    "batch_size": 4,
    "clients_per_round": 3,
    "dtype": "float64",
    "method": {"name": "fedavg", "lr": 0.02, "local_steps": 3},
    "task": SMALL,
}


def build(name: str, **settings: Any) -> Method[Any, Any, Any, Any]:
    """A method with small defaults."""
    return registry.build("method", {"name": name, "lr": 0.02, "local_steps": 3} | settings)


def takes(name: str, field: str) -> bool:
    """Whether a method has a hyper-parameter."""
    return any(one.name == field for one in dataclasses.fields(registry.choices("method")[name]))


def every_method() -> list[Any]:
    """(name, settings) of everything in the registry, for parametrize."""
    return [
        pytest.param(name, settings, id=f"{name}-{number}")
        for name in registry.choices("method")
        for number, settings in enumerate(METHODS[name])
    ]


def settings(batch: Any = 4, dtype: torch.dtype = torch.float64, weights: Any = "uniform", **others: Any) -> Settings:
    """Settings of a run with small batches."""
    name: Any = str(dtype).removeprefix("torch.")
    return Settings(batch_size=batch, dtype=name, participation=Participation(weights=weights), **others)


def small(
    dtype: torch.dtype = torch.float64,
    seeds: tuple[int, ...] = (5,),
    weights: Any = "uniform",
    batch: Any = 4,
    **task: Any,
) -> Problem:
    """A problem of 7 clients, 12 × 2 numbers."""
    return registry.build("task", SMALL | task).build(seeds, settings(batch, dtype, weights))


def start(
    method: Method[Any, Any, Any, Any], problem: Problem, clients_per_round: int = 3, transport: Any = None
) -> Loop:
    """A loop at round 0."""
    seeds = problem.seeds  # type: ignore[attr-defined]
    return Loop(method, problem, transport or Simulator(method, problem), seeds, clients_per_round, rounds=60)


def advance(loop: Loop, rounds: int) -> Loop:
    """The loop some rounds on."""
    with torch.inference_mode():
        for _ in range(rounds):
            loop.step()
    return loop


def model(loop: Loop) -> torch.Tensor:
    """x."""
    return loop.method.model(loop.server)


class WireTransport:
    """Every client apart, with its own copy of x: each message is cut out, packed, unpacked and counted."""

    def __init__(self, method: Method[Any, Any, Any, Any], problem: Problem) -> None:
        self.method, self.problem = method, problem
        state = method.init_client(problem.x0, problem.layout)
        self.replicas = [Replica(state) for _ in range(problem.clients)]
        self.down_bytes: list[list[int]] = []
        self.up_bytes: list[list[int]] = []
        self.lost: list[int] = []  # places of the cohort whose reply never arrives

    def exchange(self, rnd: Round, down: Any, buffers: Any) -> Replies:
        self.down_bytes.append([])
        self.up_bytes.append([])
        ups, arrived = [], []
        for place, client in enumerate(rnd.ids[0].tolist()):
            sent = wire.pack(wire.pick(down, place))
            self.down_bytes[-1].append(sum(a.numel() * a.element_size() for a in sent.values()))
            if place in self.lost:
                continue
            alone = replace(
                rnd, ids=np.array([[client]]), last_round=np.array([[-9]]), everyone=None, weights=None, schedule=None
            )
            self.replicas[client], reply = answer(self.method, self.problem, self.replicas[client], sent, alone)
            self.up_bytes[-1].append(sum(a.numel() * a.element_size() for a in reply.values()))
            ups.append(wire.unpack(self.method.types()[3], reply))
            arrived.append(place)
        return Replies(np.array(arrived, np.int64), wire.gather(ups) if ups else None)

    def save(self) -> wire.Arrays:
        return {}

    def saved(self) -> None:
        pass

    def load(self, arrays: wire.Arrays) -> None:
        pass


class Scripted:
    """The simulator with some replies missing."""

    def __init__(self, inner: Simulator, missing: set[tuple[int, int]]) -> None:
        self.inner, self.missing = inner, missing

    def exchange(self, rnd: Round, down: Any, buffers: Any) -> Replies:
        there = np.array([p for p, c in enumerate(rnd.ids[0].tolist()) if (rnd.t, c) not in self.missing], np.int64)
        if not len(there):
            return Replies(there, None)
        down = down.subset(there) if isinstance(down, SyncedDown) else down
        found = self.inner.exchange(rnd.subset(there), down, buffers)
        return replace(found, places=there)

    def save(self) -> Any:
        return self.inner.save()

    def saved(self) -> None:
        self.inner.saved()

    def load(self, arrays: Any) -> None:
        self.inner.load(arrays)


class Interrupt(Callback):
    """Presses Ctrl-C after a round."""

    def __init__(self, t: int) -> None:
        self.t = t

    def on_round_end(self, run: Loop) -> None:
        if run.t == self.t:
            signal.raise_signal(signal.SIGINT)


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
