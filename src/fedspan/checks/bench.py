"""What laws are tried on: a small problem, loops over it, and transports that pack every message or lose some."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch

from fedspan.core import wire
from fedspan.core.config import Participation, Settings
from fedspan.core.method import Method
from fedspan.core.objective import Problem
from fedspan.core.round import Round
from fedspan.core.sync import subset
from fedspan.engine.loop import Loop, Transport
from fedspan.engine.simulator import Replica, Simulator, answer
from fedspan.replies.chain import Chain, Replies
from fedspan.tasks.regression import Regression

Method = Method
SMALL: dict[str, Any] = {
    "clients": 7,
    "dim": 12,
    "outputs": 2,
    "samples": 9,
    "het": 1.0,
    "target_het": 1.0,
}
ROUNDS = 60  # length of the runs, for schedules


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
    return Regression(**(SMALL | task)).build(seeds, settings(batch, dtype, weights))


def start(
    method: Method,
    problem: Problem,
    clients_per_round: int = 3,
    transport: Transport | None = None,
    **others: Any,
) -> Loop:
    """A loop at round 0; `others` are fields of the loop."""
    end = transport or Simulator(method, problem)
    return Loop(method, problem, end, problem.seeds, clients_per_round, rounds=ROUNDS, **others)


def advance(loop: Loop, rounds: int) -> Loop:
    """The loop after some more rounds."""
    with torch.inference_mode():
        for _ in range(rounds):
            loop.step()
    return loop


def model(loop: Loop) -> torch.Tensor:
    """x."""
    return loop.model()


def tensors(value: Any) -> wire.Arrays:
    """A copy of all arrays of a state or message."""
    return {name: array.clone() for name, array in wire.pack(value).items()}


def same(a: wire.Arrays, b: wire.Arrays) -> bool:
    """Whether two sets of arrays are equal in every bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def bytes_of(arrays: wire.Arrays) -> int:
    """Bytes of packed arrays."""
    return sum(array.nbytes for array in arrays.values())


class WireTransport:
    """Separate clients, each with its own copy of x: every message is cut out, packed, unpacked and counted."""

    def __init__(self, method: Method, problem: Problem) -> None:
        self.method, self.problem = method, problem
        state = method.init_client(problem.x0, problem.layout)
        self.replicas = [Replica(state) for _ in range(problem.clients)]
        self.down_bytes: list[list[int]] = []
        self.up_bytes: list[list[int]] = []
        self.lost: list[int] = []  # places of the cohort whose reply never arrives

    def exchange(self, rnd: Round, down: Any, buffers: Any, chain: Chain) -> Replies:
        """A round in which every client is alone."""
        self.down_bytes.append([])
        self.up_bytes.append([])
        ups, arrived = [], []
        for place, client in enumerate(rnd.ids[0].tolist()):
            sent = wire.pack(wire.pick(down, place))
            self.down_bytes[-1].append(bytes_of(sent))
            if place in self.lost:
                continue
            alone = replace(
                rnd,
                ids=np.array([[client]]),
                last_round=np.array([[-9]]),
                everyone=None,
                weights=None,
                schedule=None,
            )
            self.replicas[client], reply = answer(
                self.method, self.problem, self.replicas[client], sent, alone
            )
            self.up_bytes[-1].append(bytes_of(reply))
            up = wire.unpack(reply)
            ups.append(up)
            arrived.append(place)
        return Replies(np.array(arrived, np.int64), wire.gather(ups) if ups else None)

    def save(self) -> wire.Arrays:
        """Return nothing: these runs are not resumed."""
        return {}

    def saved(self) -> None:
        """Do nothing."""

    def load(self, arrays: wire.Arrays) -> None:
        """Do nothing."""


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
        down = subset(down, there)
        found = self.inner.exchange(rnd.subset(there), down, buffers, chain)
        return replace(found, places=there[found.places], sent=None)

    def save(self) -> wire.Arrays:
        """The simulator's."""
        return self.inner.save()

    def saved(self) -> None:
        """The simulator's."""
        self.inner.saved()

    def load(self, arrays: wire.Arrays) -> None:
        """The simulator's."""
        self.inner.load(arrays)


def simulated(
    method: Method, problem: Problem, rounds: int, missing: set[tuple[int, int]] | None = None
) -> Loop:
    """A run in the simulator in which some replies never arrive."""
    return advance(
        start(method, problem, transport=Scripted(Simulator(method, problem), missing or set())),
        rounds,
    )


def cohort_state(loop: Loop, rnd: Round) -> Any:
    """A copy of the states of a round's clients, in a simulator."""
    assert isinstance(loop.transport, Simulator)
    states = loop.transport.clients()
    own = {name: array[:, rnd.ids[0]].clone() for name, array in wire.pack(states).items()}
    return wire.unpack(own)


def replied(loop: Loop) -> tuple[Round, Any]:
    """The next round, and the replies of its clients."""
    rnd = loop._round()
    down = loop.method.broadcast(loop.server, rnd)
    return rnd, loop.transport.exchange(rnd, down, None, loop.chain).up
