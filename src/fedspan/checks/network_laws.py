"""What every method must keep to on a network: several machines, lost and repeated replies, lost states."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

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
from fedspan.remote.messages import Agreement, Channel, RoundMessage
from fedspan.remote.server import RemoteTransport
from fedspan.replies.chain import Chain

REMOTE_ROUNDS = 9  # in which most clients take part several times, and some after a pause


class LocalChannel(Channel):
    """Clients on their own machines, in this process: they keep files alone, and `copies` of a reply arrive."""

    def __init__(self, method: Method, states_dir: Path) -> None:
        self.method, self.problem, self.states_dir = method, small(), states_dir
        described = {"method": tables.describe(method)}
        self.agreement = Agreement.of(described, self.problem.layout, self.problem.seeds[0])
        self.copies: dict[tuple[int, int], int] = {}  # (round, place in the cohort) → number

    def deliver(self, messages: list[RoundMessage]) -> Iterator[tuple[int, RoundMessage]]:
        """Yield the replies of clients that are new objects each time, as on Flower."""
        seed = self.problem.seeds[0]
        for place, message in enumerate(messages):
            state_file = StateFile.of(self.states_dir, "run", f"c{message.client}")
            own = (self.method, self.problem, state_file, message.client, seed, self.agreement)
            arrays = {name: array.clone() for name, array in message.arrays.items()}
            reply = RemoteClient(*own, ROUNDS).reply(RoundMessage.read(message.header(), arrays))
            yield from [(place, reply)] * self.copies.get((message.t, place), 1)


def _across(
    method: Method,
    rounds: int,
    copies: dict[tuple[int, int], int] | None = None,
    lost_states: int | None = None,
) -> tuple[Loop, RemoteTransport]:
    """Run clients on their own machines, which lose their states before round `lost_states`."""
    with tempfile.TemporaryDirectory() as folder:
        channel = LocalChannel(method, Path(folder))
        channel.copies = copies or {}
        problem = channel.problem
        end = RemoteTransport(
            method, problem.layout, problem.x0, problem.clients, channel, channel.agreement
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
