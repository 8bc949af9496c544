"""Small problems and runs of them, loops, transports, and what happens to runs."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch

from fedspan.checks import bench
from fedspan.checks.bench import WireTransport, advance, model, start  # noqa: F401
from fedspan.core import wire
from fedspan.core.callback import Callback
from fedspan.core.config import Participation, Settings
from fedspan.core.method import Method
from fedspan.core.objective import Problem
from fedspan.core.round import Round
from fedspan.engine.loop import Loop
from fedspan.engine.simulator import Simulator
from fedspan.replies.chain import Chain, Replies
from fedspan.tasks.regression import Regression

SMALL = {"name": "regression"} | bench.SMALL


RUN: dict[str, Any] = {
    "rounds": 30,
    "batch_size": 4,
    "clients_per_round": 3,
    "dtype": "float64",
    "method": {"name": "fedavg", "lr": 0.02, "local_steps": 3},
    "task": SMALL,
}


class Interrupt(Callback):
    """Presses Ctrl-C after a round."""

    def __init__(self, t: int) -> None:
        self.t = t

    def on_round_end(self, run: Loop) -> None:
        if run.t == self.t:
            signal.raise_signal(signal.SIGINT)


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def settings(
    batch: int | Literal["full"] = 4,
    dtype: torch.dtype = torch.float64,
    weights: Literal["uniform", "examples"] = "uniform",
    **others: Any,
) -> Settings:
    """Settings of a run with small batches."""
    name: Any = str(dtype).removeprefix("torch.")
    return Settings(
        batch_size=batch, dtype=name, participation=Participation(weights=weights), **others
    )


def small(
    dtype: torch.dtype = torch.float64,
    seeds: tuple[int, ...] = (5,),
    weights: Literal["uniform", "examples"] = "uniform",
    batch: int | Literal["full"] = 4,
    **task: Any,
) -> Problem:
    """A regression with 7 clients and 12 × 2 numbers."""
    return Regression(**(bench.SMALL | task)).build(seeds, settings(batch, dtype, weights))


class Scripted:
    """The simulator with some replies missing, each as (round, client)."""

    def __init__(self, inner: Simulator, missing: set[tuple[int, int]]) -> None:
        self.inner, self.missing = inner, missing

    def exchange(self, rnd: Round, down: Any, buffers: Any, chain: Chain) -> Replies:
        """A round of the clients that reply."""
        there = np.array(
            [p for p, c in enumerate(rnd.ids[0].tolist()) if (rnd.t, c) not in self.missing],
            np.int64,
        )
        if not len(there):
            return Replies(there, None)
        if (sync := down.get("sync")) is not None:
            down = down.replace(sync=replace(sync, last_round=sync.last_round[:, there]))
        found = self.inner.exchange(rnd.subset(there), down, buffers, chain)
        return replace(found, places=there[found.places], sent=None)

    def save(self) -> wire.Arrays:
        return self.inner.save()

    def saved(self) -> None:
        self.inner.saved()

    def load(self, arrays: wire.Arrays) -> None:
        self.inner.load(arrays)


def simulated(
    method: Method, problem: Problem, rounds: int, missing: set[tuple[int, int]] | None = None
) -> Loop:
    """A run in the simulator in which some replies never arrive."""
    return advance(
        start(method, problem, transport=Scripted(Simulator(method, problem), missing or set())),
        rounds,
    )
