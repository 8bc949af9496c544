"""What laws are made of and tried on: a small problem, loops over it, and clients apart, which pack every message.

A law is a function that tries something with a value and raises where it does not hold. Its docstring is the law in
words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch

from fedspan.core import wire
from fedspan.core.bundle import MissingPartError
from fedspan.core.config import Participation, Settings
from fedspan.core.errors import FedspanError, FormError, one_line
from fedspan.core.method import Method
from fedspan.core.objective import Problem
from fedspan.core.round import Round
from fedspan.engine.loop import Loop, Transport
from fedspan.engine.simulator import Replica, Simulator, answer
from fedspan.replies.chain import Chain, Replies
from fedspan.tasks.regression import Regression

Law = Callable[[Any], None]
Tried = tuple[str, bool | None, str]
"""A law in words, whether it holds (None: it was not tried), and why not."""
STOPPED: Tried = ("The other laws", None, "not tried: correct this first")
SMALL: dict[str, Any] = {
    "clients": 7,
    "dim": 12,
    "outputs": 2,
    "samples": 9,
    "het": 1.0,
    "target_het": 1.0,
}
ROUNDS = 60  # length of the runs, for schedules


# --- Trying a law ---


def words_of(law: Law) -> str:
    """Return a law in words."""
    return str(law.__doc__).strip().removesuffix(".")


def tried(laws: Iterable[Law], value: Any) -> list[Tried]:
    """Try every law on a value, up to one that finds a function to return something of a wrong form."""
    found: list[Tried] = []
    for law in laws:
        holds, why, wrong_form = True, "", False
        try:
            law(value)
        except Exception as error:  # whatever a user's own code raises is the answer
            holds, why = False, one_line(error, 1000)
            wrong_form = isinstance(error, FormError | MissingPartError)
        found.append((words_of(law), holds, why))
        if wrong_form:
            return [*found, STOPPED]
    return found


def hold(condition: object, words: str, kind: type[FedspanError] = FedspanError) -> None:
    """Raise an error unless the condition holds."""
    if not condition:
        raise kind(words)


def near(a: torch.Tensor, b: torch.Tensor, tolerance: float, words: str) -> None:
    """Raise unless two vectors agree in shape and, up to a relative tolerance, in their values."""
    hold(a.shape == b.shape, f"{words}: shape {tuple(a.shape)} instead of {tuple(b.shape)}")
    wrong = float((a - b).abs().max()) if a.numel() else 0.0
    close = torch.allclose(a, b, rtol=tolerance, atol=1e-2 * tolerance)
    hold(close, f"{words}: they differ by up to {wrong:.2g}")


def same_bytes(one: Loop, other: Loop, words: str, runs: slice = slice(None)) -> None:
    """Raise unless the ledger of a run is that of some runs of another loop; `{}` in the words is the direction."""
    for name in ("up", "down"):
        counted = getattr(one.ledger, name) == getattr(other.ledger, name)[runs]
        hold(counted.all(), words.format(name))


def random(*shape: int) -> torch.Tensor:
    """Return values of the normal distribution, always the same ones."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def tensors(value: Any) -> wire.Arrays:
    """Return a copy of all arrays of a state or message."""
    return {name: array.clone() for name, array in wire.pack(value).items()}


def same(a: wire.Arrays, b: wire.Arrays) -> bool:
    """Return whether two sets of arrays are equal in every bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# --- Runs ---


def small(
    dtype: Literal["float32", "float64"] = "float64",
    seeds: tuple[int, ...] = (5,),
    batch: int | Literal["full"] = 4,
    **task: Any,
) -> Problem:
    """Return a regression with 7 clients and 12 × 2 parameters."""
    uniform = Participation(weights="uniform")
    settings = Settings(batch_size=batch, dtype=dtype, participation=uniform)
    return Regression(**(SMALL | task)).build(seeds, settings)


def start(
    method: Method,
    problem: Problem,
    clients_per_round: int = 3,
    transport: Transport | None = None,
    **others: Any,
) -> Loop:
    """Return a loop at round 0; `others` are fields of the loop."""
    end = transport or Simulator(method, problem)
    return Loop(method, problem, end, problem.seeds, clients_per_round, rounds=ROUNDS, **others)


def advance(loop: Loop, rounds: int) -> Loop:
    """Return the loop after some more rounds."""
    with torch.inference_mode():
        for _ in range(rounds):
            loop.step()
    return loop


def model(loop: Loop) -> torch.Tensor:
    """Return x."""
    return loop.model()


def cohort_state(loop: Loop, rnd: Round) -> Any:
    """Return a copy of the states of a round's clients, in a simulator."""
    assert isinstance(loop.transport, Simulator)
    states = wire.pack(loop.transport.clients())
    return wire.unpack({name: array[:, rnd.ids[0]].clone() for name, array in states.items()})


def worked(loop: Loop) -> tuple[Round, Any, Any, Any, Any]:
    """Return the next round with its download, and its clients' states before it, states after it and replies."""
    rnd = loop._round()
    down, before = loop.method.broadcast(loop.server, rnd), cohort_state(loop, rnd)
    after, up = loop.method.client_step(before, down, loop.problem.cohort(rnd), rnd)
    return rnd, down, before, after, up


class WireTransport(Transport):
    """Separate clients, each with its own copy of x: every message is cut out, packed, unpacked and counted."""

    def __init__(self, method: Method, problem: Problem) -> None:
        self.method, self.problem = method, problem
        self.replicas = [Replica(method.init_client(problem.x0, problem.layout))] * problem.clients
        self.down_bytes: list[list[int]] = []
        self.up_bytes: list[list[int]] = []
        self.lost: list[int] = []  # places of the cohort whose reply never arrives

    def exchange(self, rnd: Round, down: Any, buffers: Any, chain: Chain) -> Replies:
        """Do a round in which every client is alone."""
        sent, received, ups, arrived = [], [], [], []
        for place, client in enumerate(rnd.ids[0].tolist()):
            message, replica = wire.pack(wire.pick(down, place)), self.replicas[client]
            sent.append(sum(array.nbytes for array in message.values()))
            if place in self.lost:
                continue
            ids, never = np.array([[client]]), np.array([[-9]])
            alone = replace(
                rnd, ids=ids, last_round=never, everyone=None, weights=None, schedule=None
            )
            after, reply = answer(self.method, self.problem, replica, message, alone)
            self.replicas[client] = after
            received.append(sum(array.nbytes for array in reply.values()))
            ups.append(wire.unpack(reply))
            arrived.append(place)
        self.down_bytes.append(sent)
        self.up_bytes.append(received)
        return Replies(np.array(arrived, np.int64), wire.gather(ups) if ups else None)
