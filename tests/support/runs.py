"""Small problems and runs of them, loops, transports, and what happens to runs."""

from __future__ import annotations

import signal
from typing import Any

import torch

from fedspan.checks import bench
from fedspan.checks.bench import Scripted, WireTransport, advance, model, settings, small, start  # noqa: F401
from fedspan.core.callback import Callback
from fedspan.engine.loop import Loop

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
