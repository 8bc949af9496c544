"""What every method must keep to on a network: several machines, lost and repeated replies, lost states."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np

from fedspan.checks.bench import (
    ROUNDS,
    WireTransport,
    advance,
    hold,
    model,
    near,
    same_bytes,
    small,
    start,
)
from fedspan.core import tables
from fedspan.core.config import Participation
from fedspan.core.method import Method
from fedspan.engine.loop import Loop
from fedspan.engine.simulator import Simulator
from fedspan.engine.states import InMemory
from fedspan.remote.client import RemoteClient, StateFile
from fedspan.remote.messages import Agreement, RoundMessage
from fedspan.remote.server import RemoteTransport
from fedspan.replies.chain import Chain

REMOTE_ROUNDS = 9  # in which most clients take part several times, and some after a pause


def _across(
    method: Method,
    rounds: int,
    copies: Mapping[tuple[int, int], int] = MappingProxyType({}),
    lost_states: int | None = None,
) -> tuple[Loop, RemoteTransport]:
    """Run clients on their own machines, in this process: they keep files alone.

    `copies[round, place in the cohort]` of a reply arrive. All states are lost before round `lost_states`.
    """
    problem = small()
    seed, described = problem.seeds[0], {"method": tables.describe(method)}
    agreement = Agreement.of(described, problem.layout, seed)
    with tempfile.TemporaryDirectory() as folder:

        def deliver(messages: list[RoundMessage]) -> Iterator[tuple[int, RoundMessage]]:
            for place, message in enumerate(messages):
                state_file = StateFile.of(Path(folder), "run", f"c{message.client}")
                own = (method, problem, state_file, message.client, seed, agreement, ROUNDS)
                arrays = {name: array.clone() for name, array in message.arrays.items()}
                # a new object each time, as on Flower
                reply = RemoteClient(*own).reply(RoundMessage.read(message.header(), arrays))
                yield from [(place, reply)] * copies.get((message.t, place), 1)

        channel: Any = SimpleNamespace(deliver=deliver)
        end = RemoteTransport(
            method, problem.layout, problem.x0, problem.clients, channel, agreement
        )
        loop = start(method, problem, transport=end, chain=Chain(method, Participation()))
        for t in range(rounds):
            for path in Path(folder).rglob("*.safetensors") if t == lost_states else ():
                path.unlink()
            advance(loop, 1)
        return loop, end


def machines(method: Method) -> None:
    """Server and clients on several machines give the simulator's result."""
    here = advance(start(method, small()), REMOTE_ROUNDS)
    there, end = _across(method, REMOTE_ROUNDS)
    hold(not there.events, f"a client failed: {' '.join(there.events[:1])}")
    near(
        model(there),
        model(here),
        1e-12,
        "clients on other machines give another model than the simulator",
    )
    same_bytes(there, here, "the bytes {} of clients on other machines are not the simulator's")
    hold(end.accepted.sum() == REMOTE_ROUNDS * 3, "not every reply was accepted")


def dropped(method: Method) -> None:
    """A dropped client costs its reply and nothing else."""
    silent = (2, 3, 6)  # rounds in which one client works, and is not heard
    loop, _ = _across(method, REMOTE_ROUNDS, {(t, 1): 0 for t in silent})
    transport = WireTransport(method, small())
    here = start(method, transport.problem, transport=transport)
    for t in range(REMOTE_ROUNDS):
        transport.lost = [1] if t in silent else []
        advance(here, 1)
    near(model(loop), model(here), 1e-12, "a reply that was lost on its way still has an effect")


def twice(method: Method) -> None:
    """A reply that arrives twice counts once."""
    loop, _ = _across(method, 6, {(1, 0): 2})
    here = advance(start(method, small()), 6)
    near(model(loop), model(here), 1e-12, "a second copy of a reply has an effect")


def restored(method: Method) -> None:
    """A client that lost its state gets it back."""
    loop, _ = _across(method, 12, lost_states=6)
    problem = small()
    here = advance(start(method, problem), 6)
    assert isinstance(here.transport, Simulator)
    first = method.init_client(problem.x0, problem.layout)
    for field in method.private:  # what no server can know begins again
        states = here.transport.states.tables[field]
        assert isinstance(states, InMemory)
        states.put(np.arange(problem.clients), getattr(first, field)[0].expand(problem.clients, -1))
    near(
        model(loop),
        model(advance(here, 6)),
        1e-10,
        "a state that was restored from replies is another one",
    )


LAWS = (machines, dropped, twice, restored)
