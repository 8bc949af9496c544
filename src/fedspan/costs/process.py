"""What a client's process holds at its peak across machines: whole rounds of `engine.simulator`, run without numbers.

A round starts from a message in memory and a state on disk, which is mapped: the system may drop its pages at any time,
so that they are not counted. Two rounds are looked at: the first, to which the server sends x in full, and a later one,
to which it sends what the client has missed. What Python, torch and Flower take themselves is not counted.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from fedspan.core import wire
from fedspan.core.layout import Layout
from fedspan.core.method import LogsChanges, Method
from fedspan.core.round import Round
from fedspan.core.sync import SyncedDown
from fedspan.costs.dry_run import Live, rehearsal
from fedspan.costs.sketch import OneBatch, Sketch
from fedspan.engine.simulator import Replica, answer
from fedspan.nn.problem import TorchProblem

STEPS = 2  # local steps until all that lasts is there
UNPACKED = 2  # times that a message is in memory while Flower unpacks it

AnyMethod = Method[Any, Any, Any, Any]


def client_peak(method: AnyMethod, sketch: Sketch, lag: int) -> int:
    """Bytes at the peak of a client's process, if a client takes part in every `lag`-th round."""
    method = dataclasses.replace(method, lr=1.0, local_steps=STEPS)  # type: ignore[type-var]
    with rehearsal() as live, torch.no_grad():
        problem = sketch.problem()
        layout = dataclasses.replace(
            problem.layout
        )  # of its own: what is drawn for it is in nobody else's cache
        weights = live.restart()
        problem.in_memory = problem.module.same_dtype  # as on a CPU
        built = weights + max(block.size for block in layout.blocks) * problem.module.flat.itemsize
        with live.pause():
            first = _First.of(method, layout)
        received = sum(array.nbytes for array in first.down.values())
        new = sum(array.nbytes for array in wire.pack(first.replica.state).values())
        peaks = [max(UNPACKED * received, received + built, received + new)]
        peaks.append(_round(method, problem, first.down, first.replica, first.rnd, live))
        down, replica, rnd = first.later(lag, live)
        peaks.append(_round(method, problem, down, replica, rnd, live))
    return max(peaks)


def _round(
    method: AnyMethod,
    problem: TorchProblem,
    down: wire.Arrays,
    replica: Replica,
    rnd: Round,
    live: Live,
) -> int:
    """Bytes at the peak of a round, from the message in memory to the new state."""
    problem.module.checked = True
    if problem.in_memory:
        problem.module.forget()  # a message has a process of its own
    live.count(
        part
        for source in problem.client_data
        if isinstance(source, OneBatch)
        for part in source.tensors()
    )
    live.restart()
    received = {
        name: torch.empty_like(array) if array.is_meta else array for name, array in down.items()
    }
    answer(method, problem, replica, received, rnd)
    problem.release()
    return live.peak


@dataclasses.dataclass(frozen=True, eq=False)
class _First:
    """The first round of a client, and what its server holds."""

    method: AnyMethod
    server: Any
    down: wire.Arrays
    replica: Replica
    rnd: Round

    @staticmethod
    def of(method: AnyMethod, layout: Layout) -> _First:
        x = torch.empty(1, 1, layout.size, dtype=layout.dtype)
        server, rnd = method.init_server(x, layout), _rnd(0, layout, -1)
        down = wire.pack(wire.pick(method.broadcast(server, rnd), 0))
        return _First(method, server, down, Replica(method.init_client(x, layout)), rnd)

    def later(self, lag: int, live: Live) -> tuple[wire.Arrays, Replica, Round]:
        """Message, state and round of a client that takes part again; the server's moves have no numbers either."""
        method, server, layout = self.method, self.server, self.rnd.layout
        with live.pause():
            if isinstance(method, LogsChanges):
                for t in range(lag):
                    server = method.empty_round(server, _rnd(t, layout, t))
            rnd = _rnd(lag, layout, 0)
            message = method.broadcast(server, rnd)
            copy = message.sync.model if isinstance(message, SyncedDown) else None
            return wire.pack(wire.pick(message, 0)), Replica(self.replica.state, copy, 0), rnd


def _rnd(t: int, layout: Layout, last_round: int) -> Round:
    everyone = np.full((1, 1), last_round)
    return Round(
        t, (0,), 1, layout, np.zeros((1, 1), np.int64), everyone, local_steps=STEPS, rounds=t + 1
    )
