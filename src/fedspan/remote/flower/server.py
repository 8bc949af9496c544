"""The server's end: letters over Flower's grid to whichever node speaks for a client, and a whole run."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedspan.api.spec import Spec
from fedspan.core.errors import FedspanError, SpecError
from fedspan.core.layout import DTYPES
from fedspan.core.method import Round
from fedspan.engine.history import Line, Rounds
from fedspan.engine.loop import Loop, Replies, Row
from fedspan.engine.run_dir import Result, execute
from fedspan.remote.flower.client import WHO
from fedspan.remote.flower.records import Config, letter_of, limit_of, record_of, size_of
from fedspan.remote.messages import RoundMessage
from fedspan.remote.server import Server, Unsent

log = logging.getLogger("flwr")
POLL = 0.1  # seconds between two looks for replies
LOOK = 0.5  # between two looks for clients that are not there yet
ASK = 60.0  # seconds in which a node must say which client it is


@dataclass
class GridLink:
    """Carries letters over Flower's grid, to whichever node speaks for a client now."""

    grid: Grid
    clients: int
    timeout: float
    limit: int
    nodes: dict[int, int] = field(default_factory=dict)  # client → node
    told: dict[int, int] = field(default_factory=dict)  # node → the client it says it is, in the order of answers
    asked: dict[str, tuple[int, float]] = field(default_factory=dict)  # message → (node, until when it may answer)
    refused: set[int] = field(default_factory=set)
    wire_down: int = 0  # bytes of records, headers included
    wire_up: int = 0

    def deliver(self, round_messages: list[RoundMessage]) -> Iterator[tuple[int, RoundMessage | str]]:
        """Send all, and yield replies as they come until the time is up."""
        self.look()
        messages, numbers = [], []
        for number, round_message in enumerate(round_messages):
            node = self.nodes.get(round_message.client)
            if node is None:
                yield number, Unsent("not connected")
                continue
            content = record_of(round_message)
            self.wire_down += size_of(content)
            messages.append(Message(content, node, "train", ttl=self.timeout + 60, group_id=str(round_message.t)))
            numbers.append(number)
        waiting = dict(zip(self.grid.push_messages(messages), numbers, strict=True))
        for number in [n for i, n in waiting.items() if not i]:
            yield number, Unsent("the message could not be sent")
        for ident, message in self._replies([i for i in waiting if i], self.timeout):
            yield waiting[ident], self._read(message)

    def _read(self, message: Message) -> RoundMessage | str:
        if message.has_error():
            return f"Flower error {message.error.code}: {message.error.reason}"
        self.wire_up += size_of(message.content)
        try:
            return letter_of(message.content, self.limit)
        except FedspanError as error:
            return f"reply refused: {error}"

    def _replies(self, idents: list[str], timeout: float) -> Iterator[tuple[str, Message]]:
        until, left = time.monotonic() + timeout, set(idents)
        while left and time.monotonic() < until:
            for message in self.grid.pull_messages(left):
                ident = message.metadata.reply_to_message_id
                if ident in left:
                    left.discard(ident)
                    yield ident, message
            if left:
                time.sleep(POLL)

    def look(self) -> None:
        """Ask nodes that are new which client they are, and hear what has been answered; never waits.

        The newest node speaks for a client. A node that does not answer in time is asked again.
        """
        here, now = set(self.grid.get_node_ids()), time.monotonic()
        self.told = {node: client for node, client in self.told.items() if node in here}
        self.asked = {i: (node, until) for i, (node, until) in self.asked.items() if node in here and until > now}
        known = {*self.told, *self.refused, *(node for node, _ in self.asked.values())}
        new = sorted(here - known)
        idents = self.grid.push_messages([Message(RecordDict(), node, "query", ttl=ASK) for node in new]) if new else []
        self.asked |= {ident: (node, now + ASK) for ident, node in zip(idents, new, strict=True) if ident}
        for message in self.grid.pull_messages(list(self.asked)) if self.asked else ():
            node, _ = self.asked.pop(message.metadata.reply_to_message_id, (0, 0.0))
            if node:
                self._hear(node, message)
        self.nodes = {client: node for node, client in self.told.items()}  # of two for one client, who answered last

    def _hear(self, node: int, message: Message) -> None:
        if message.has_error():
            log.warning("a node did not say which client it is: %s", message.error.reason)
            return
        said = dict(message.content[WHO]) if WHO in message.content else {}
        client = said.get("client")
        if isinstance(client, int) and 0 <= client < self.clients:
            self.told[node] = client
        else:
            self.refused.add(node)
            why = said.get("reason") or f"it says it is client {client!r}, but the run has 0 to {self.clients - 1}"
            log.warning("fedspan leaves a node out: %s", why)

    def wait(self, seconds: float) -> None:
        """Until all clients are connected, or the time is up."""
        until = time.monotonic() + seconds
        while True:
            self.look()
            if len(self.nodes) >= self.clients or time.monotonic() > until:
                log.info("%d of %d clients are connected", len(self.nodes), self.clients)
                return
            time.sleep(LOOK)


@dataclass
class Watch:
    """What a run shows while it goes on: lines in Flower's log, and one in `rounds.jsonl` for each round."""

    rounds: Rounds
    link: GridLink
    of: int
    seen: tuple[int, int] = (0, 0)

    def round(self, rnd: Round, found: Replies) -> None:
        """After each round: who was asked and counted, bytes, and what went wrong."""
        now = (self.link.wire_up, self.link.wire_down)
        line: Line = {"round": rnd.t, "asked": rnd.ids[0].tolist(), "counted": rnd.ids[0][found.places].tolist()}
        line["payload_up"] = 0 if found.received is None else int(found.received.sum())
        line["payload_down"] = 0 if found.sent is None else int(found.sent.sum())
        line["records_up"], line["records_down"] = (new - old for new, old in zip(now, self.seen, strict=True))
        self.rounds.append(line | ({"events": list(found.events)} if found.events else {}))
        self.seen = now
        for event in found.events:
            log.warning("fedspan %s", event)

    def row(self, row: Row) -> None:
        """After each scored round."""
        values = "  ".join(f"{name} {value[0]:.4g}" for name, value in row.metrics.items())
        sizes = f"{row.up_bytes[0] / 1e6:.3f} MB up  {row.down_bytes[0] / 1e6:.3f} MB down"
        log.info("fedspan round %d of %d  %s  %s", row.round, self.of, values, sizes)


def serve(spec: Spec, grid: Grid, settings: Config) -> Result:
    """A whole run from the server's end."""
    if not settings["out"]:
        raise SpecError("run config 'out' is missing: a folder for the server's results and checkpoints")
    if spec.epochs is not None:
        raise SpecError(
            "`epochs` needs the clients' amounts of data, which a server does not have; give method.local_steps"
        )
    if spec.diagnostics:
        raise SpecError("`diagnostics` needs all clients' data and states, which a server does not have; leave it out")
    out, method = Path(settings["out"]).expanduser(), spec.method
    problem = spec.task.server_problem((spec.seed,), DTYPES[spec.dtype], spec.participation.weights)
    link = GridLink(grid, problem.clients, settings["timeout"], limit_of(problem))
    watch = Watch(Rounds(out / "rounds.jsonl"), link, spec.rounds)
    end = Server(
        method, problem.layout, problem.x0, problem.clients, link, spec.seed, minimum=settings["minimum"],
        cast=settings["cast"], backup=settings["backup"], folder=out / "copies", resume=settings["resume"],
        on_round=watch.round,
    )  # fmt: skip
    loop = Loop(method, problem, end, (spec.seed,), spec.participation.clients_per_round or problem.clients)
    link.wait(settings["wait"])
    result = execute(
        loop, spec.table(), out, resume=settings["resume"], on_row=watch.row, every=settings["checkpoint-every"],
        signals=False,  # Flower's own end the app at once, and the last checkpoint is there to go on from
    )  # fmt: skip
    log.info("fedspan %s; results in %s", result.status(0), out)
    return result
