"""What every method must keep to on a network: several machines, lost and repeated replies, lost states."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedspan.checks.bench import advance, model, simulated, small, start
from fedspan.checks.channel import ids_of, remote
from fedspan.checks.law import hold, near, same_bytes
from fedspan.core.method import Method
from fedspan.engine.loop import Loop
from fedspan.engine.simulator import Simulator
from fedspan.engine.states import InMemory

REMOTE_ROUNDS = 9  # in which most clients take part several times, and some after a pause


def _across(method: Method, rounds: int, prepare: Callable[[Loop, Any], None]) -> tuple[Loop, Any]:
    """A run with clients on their own machines, after `prepare` has arranged faults."""
    with tempfile.TemporaryDirectory() as states_dir:
        loop, channel, end = remote(method, small(), Path(states_dir))
        prepare(loop, channel)
        return advance(loop, rounds), end


def machines(method: Method) -> None:
    """Server and clients on several machines give the simulator's result."""
    here = simulated(method, small(), REMOTE_ROUNDS)
    there, end = _across(method, REMOTE_ROUNDS, lambda *_: None)
    hold(not there.events, f"a client failed: {' '.join(there.events[:1])}")
    near(
        model(there),
        model(here),
        1e-12,
        "clients on other machines give another model than the simulator",
    )
    words = "the bytes {} of clients on other machines are not the simulator's"
    same_bytes(there, here, words)
    hold(end.accepted.sum() == REMOTE_ROUNDS * 3, "not every reply was accepted")


def dropped(method: Method) -> None:
    """A dropped client costs its reply and nothing else."""
    missing: set[tuple[int, int]] = set()

    def prepare(loop: Loop, channel: Any) -> None:
        for t in (2, 3, 6):
            client = ids_of(loop, t)[1]
            missing.add((t, client))
            channel.faults[t, client] = lambda m: [channel.client(m.client).reply(m)][
                :0
            ]  # works, and is not heard

    loop, _ = _across(method, REMOTE_ROUNDS, prepare)
    here = simulated(method, small(), REMOTE_ROUNDS, missing)
    near(model(loop), model(here), 1e-12, "a reply that was lost on its way still has an effect")


def twice(method: Method) -> None:
    """A reply that arrives twice counts once."""

    def prepare(loop: Loop, channel: Any) -> None:
        channel.faults[1, ids_of(loop, 1)[0]] = lambda m: [channel.client(m.client).reply(m)] * 2

    loop, _ = _across(method, 6, prepare)
    near(
        model(loop),
        model(simulated(method, small(), 6)),
        1e-12,
        "a second copy of a reply has an effect",
    )


def restored(method: Method) -> None:
    """A client that lost its state gets it back."""
    problem = small()
    with tempfile.TemporaryDirectory() as states_dir:
        loop, _, _ = remote(method, problem, Path(states_dir))
        advance(loop, 6)
        for path in Path(states_dir).rglob("*.safetensors"):
            path.unlink()
        advance(loop, 6)
    here = start(method, problem)
    advance(here, 6)
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
