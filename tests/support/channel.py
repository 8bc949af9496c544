"""Clients on their own machines, in one process: messages pass through a channel that can be made to fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fedspan.checks.bench import ROUNDS
from fedspan.core import tables
from fedspan.core.config import Participation
from fedspan.core.method import Method
from fedspan.core.objective import Problem
from fedspan.engine.loop import Loop
from fedspan.remote.client import RemoteClient, StateFile
from fedspan.remote.messages import Agreement, DroppedError, RoundMessage
from fedspan.remote.server import RemoteTransport
from fedspan.replies.chain import Chain
from support.loops import start

Fault = Callable[[RoundMessage], list[Any]]


class LocalChannel:
    """A channel in this process; `faults[(round, client)]` is what becomes of a message.

    The other questions of a secure sum are at `faults[(round, client, question)]`.
    """

    def __init__(self, method: Method, problem: Problem, states_dir: Path, **settings: Any) -> None:
        self.method, self.problem, self.states_dir, self.settings = (
            method,
            problem,
            states_dir,
            settings,
        )
        self.kind: Callable[..., RemoteClient] = RemoteClient
        self.known_start = False
        self.faults: dict[tuple[Any, ...], Fault] = {}
        self.messages: list[tuple[RoundMessage, RoundMessage | None]] = []

    def client(self, number: int) -> RemoteClient:
        """A new object each time, as on Flower: only the files remain."""
        state_file = StateFile.of(self.states_dir, "run", f"c{number}")
        agreement = agree(self.method, self.problem, **self.settings)
        own = (
            self.method,
            self.problem,
            state_file,
            number,
            self.problem.seeds[0],
            agreement,
            ROUNDS,
        )
        return self.kind(*own, known_start=self.known_start)

    def deliver(
        self, messages: list[RoundMessage]
    ) -> Iterator[tuple[int, RoundMessage | DroppedError]]:
        """The replies, or what a fault makes of them."""
        for number, message in enumerate(messages):
            again = RoundMessage.read(
                message.header(), {k: v.clone() for k, v in message.arrays.items()}
            )
            place = (message.t, message.client)
            fault = self.faults.pop(
                place if message.status == "train" else (*place, message.status), None
            )
            if fault is None:
                reply = self.client(message.client).reply(again)
                self.messages.append((message, reply))
                yield number, reply
            else:
                for one in fault(again):
                    yield number, one


def agree(method: Method, problem: Problem, **settings: Any) -> Agreement:
    """What both ends have in common."""
    return Agreement.of(
        {"method": tables.describe(method)} | settings, problem.layout, problem.seeds[0]
    )


def remote(
    method: Method,
    problem: Problem,
    states_dir: Path,
    *,
    chain: Chain | None = None,
    known_start: bool = False,
    **options: Any,
) -> tuple[Loop, LocalChannel, RemoteTransport]:
    """A run across a channel; `options` are those of the transport. By default replies are screened."""
    channel, agreement = LocalChannel(method, problem, states_dir), agree(method, problem)
    channel.known_start = known_start
    end = RemoteTransport(
        method, problem.layout, problem.x0, problem.clients, channel, agreement, **options
    )
    chain = chain or Chain(method, Participation())
    loop = start(method, problem, transport=end, known_start=known_start, chain=chain)
    return loop, channel, end


def ids_of(loop: Loop, t: int) -> list[int]:
    """Who takes part in round t; with noise its own coins decide."""
    kept, loop.t = loop.t, t
    try:
        ids: list[int] = loop._round().ids[0].tolist()
        return ids
    finally:
        loop.t = kept
