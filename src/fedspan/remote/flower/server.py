"""The server's end on Flower: messages over Flower's grid to the node of each client, and a whole run."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedspan.core import refusals
from fedspan.core.callback import Callback
from fedspan.core.errors import SpecError, one_line
from fedspan.core.method import DETAILS
from fedspan.core.spec import Spec
from fedspan.engine.loop import Loop, Row
from fedspan.engine.result import Result
from fedspan.engine.run_dir import Keeping, execute
from fedspan.remote.channel import Failure
from fedspan.remote.flower.client import IDENTITY, agreement_of
from fedspan.remote.flower.records import RunConfig, count_bytes, read_message, write_message
from fedspan.remote.messages import RoundMessage
from fedspan.remote.roster import ROSTER, Roster
from fedspan.remote.server import RemoteTransport
from fedspan.replies.chain import Chain, Event

log = logging.getLogger("flwr")
GRACE = 2.0  # seconds more for clients that were silent when last asked
REPLY_POLL = 0.1  # seconds between two looks for replies
NODE_POLL = 0.5  # seconds between two looks for clients that are not connected yet
IDENTIFY_TIMEOUT = 60.0  # seconds in which a node must say which client it is
AHEAD = 1.0  # seconds by which a key is registered before its node comes; a node's own takes one message
_WORDS = {
    True: ("authenticated", "bound to them"),
    False: ("not authenticated", "not bound to them"),
}


@dataclass(frozen=True)
class Request:
    """A question to a node which client it is."""

    node: int
    deadline: float


@dataclass
class GridChannel:
    """Carries messages over Flower's grid, to the node that stands for each client at the time."""

    grid: Grid
    clients: int
    timeout: float
    roster: Roster | None = None  # the node of each client's number; None: the newest node
    bound: bool | None = True  # whether the roster is kept to; None: if Flower authenticates nodes
    nodes: dict[int, int] = field(default_factory=dict)  # client → node
    identified: dict[int, int] = field(
        default_factory=dict
    )  # node → client, in the order of the replies
    requests: dict[str, Request] = field(default_factory=dict)  # by message id
    refused: set[int] = field(default_factory=set)  # nodes
    silent: set[int] = field(
        default_factory=set
    )  # clients that did not reply in time when last asked
    news: list[str] = field(default_factory=list)  # what happened to nodes since the last round
    records_up: int = 0  # bytes of records, headers included
    records_down: int = 0

    def deliver(self, messages: list[RoundMessage]) -> Iterator[tuple[int, RoundMessage | Failure]]:
        """Send all messages, and yield replies as they arrive until the time is up."""
        self.find_nodes()
        self.decide_binding()
        outgoing, indices = [], []
        for index, message in enumerate(messages):
            node = self.nodes.get(message.client)
            if node is None:
                yield index, Failure("not connected", sent=False)
                continue
            content = write_message(message)
            self.records_down += count_bytes(content)
            outgoing.append(
                Message(content, node, "train", ttl=self.timeout + 60, group_id=str(message.t))
            )
            indices.append(index)
        waiting: dict[str, int] = {}
        for ident, index in zip(self.grid.push_messages(outgoing), indices, strict=True):
            if ident:
                waiting[ident] = index
            else:
                yield index, Failure("the message could not be sent", sent=False)
        for ident, reply in self._replies(
            {ident: messages[index].client for ident, index in waiting.items()}
        ):
            index = waiting[ident]
            yield index, self._read(reply, messages[index].max_reply)

    def _read(self, reply: Message, max_bytes: int) -> RoundMessage | Failure:
        if reply.has_error():
            told = f"Flower error {reply.error.code}: {one_line(reply.error.reason)}"
            return Failure(told, kind="other")
        try:
            self.records_up += count_bytes(reply.content)
            return read_message(reply.content, max_bytes)
        except Exception as error:  # of whatever kind: it is this client's failure, never the run's
            return Failure(f"reply refused: {one_line(error)}", kind="refused")

    def _replies(self, missing: dict[str, int]) -> Iterator[tuple[str, Message]]:
        """Replies to messages, given as message → client.

        Once all others have replied, clients that were silent when last asked get as long again as the others took.
        """
        began = time.monotonic()
        deadline, known = began + self.timeout, not self.silent.issuperset(missing.values())
        while missing and time.monotonic() < deadline:
            for reply in self.grid.pull_messages(list(missing)):
                ident = reply.metadata.reply_to_message_id
                if ident in missing:
                    self.silent.discard(missing.pop(ident))
                    yield ident, reply
            if missing and known and self.silent.issuperset(missing.values()):
                deadline, known = min(deadline, 2 * time.monotonic() - began + GRACE), False
            if missing:
                time.sleep(REPLY_POLL)
        self.silent |= set(missing.values())

    def find_nodes(self) -> None:
        """Request from new nodes which client they are, and read the replies that are there; never waits.

        The newest node stands for a client. A node that does not reply in time gets a new request.
        """
        online, now = set(self.grid.get_node_ids()), time.monotonic()
        self.identified = {
            node: client for node, client in self.identified.items() if node in online
        }
        self.requests = {
            i: r for i, r in self.requests.items() if r.node in online and r.deadline > now
        }
        new = sorted(
            online - {*self.identified, *self.refused, *(r.node for r in self.requests.values())}
        )
        queries = [Message(RecordDict(), node, "query", ttl=IDENTIFY_TIMEOUT) for node in new]
        idents = self.grid.push_messages(queries) if new else []
        for ident, node in zip(idents, new, strict=True):
            if ident:
                self.requests[ident] = Request(node, now + IDENTIFY_TIMEOUT)
        for reply in self.grid.pull_messages(list(self.requests)) if self.requests else ():
            request = self.requests.pop(reply.metadata.reply_to_message_id, None)
            if request is not None:
                self._identify(request.node, reply)
        self.nodes = {
            client: node for node, client in self.identified.items()
        }  # of two nodes the last one remains

    def _identify(self, node: int, reply: Message) -> None:
        if reply.has_error():
            log.warning("a node did not say which client it is: %s", one_line(reply.error.reason))
            return
        record = reply.content.get(IDENTITY)
        identity = dict(record) if isinstance(record, ConfigRecord) else {}
        client = identity.get("client")
        if isinstance(client, int) and 0 <= client < self.clients:
            if self.bound and self.roster is not None and not self.roster.admits(client, node):
                self._refuse(client, node)
                return
            self.identified[node] = client
        else:
            self.refused.add(node)
            reason = (
                identity.get("reason")
                or f"it is client {client!r}, but the run has 0 to {self.clients - 1}"
            )
            log.warning("fedspan ignores a node: %s", one_line(reason))

    def _refuse(self, client: int, node: int) -> None:
        self.refused.add(node)
        self.news.append(
            f"node {node} is refused as client {client}, which belongs to another node"
        )

    def decide_binding(self) -> None:
        """Bind clients to nodes if Flower authenticates these; decided once, when some are connected."""
        if self.bound is not None or self.roster is None or not self.identified:
            return
        known = [_registered_before(node) for node in getattr(self.grid, "get_nodes", tuple)()]
        self.bound = 2 * sum(known) > len(known)
        for node, client in list(self.identified.items()) if self.bound else ():
            if not self.roster.admits(client, node):
                del self.identified[node]
                self._refuse(client, node)
        self.nodes = {client: node for node, client in self.identified.items()}
        log.info("nodes are %s, so clients are %s", *_WORDS[self.bound])

    def wait(self, seconds: float) -> None:
        """Wait until all clients are connected or the time is up."""
        deadline = time.monotonic() + seconds
        while True:
            self.find_nodes()
            if len(self.nodes) >= self.clients or time.monotonic() > deadline:
                self.decide_binding()
                log.info("%d of %d clients are connected", len(self.nodes), self.clients)
                return
            time.sleep(NODE_POLL)


def _registered_before(node: Any) -> bool:
    """Whether somebody registered a node's key before the node came, as authentication demands.

    Without authentication a node registers a new key of its own just before it connects.
    """
    try:
        registered, came = map(datetime.fromisoformat, (node.registered_at, node.last_activated_at))
        return (came - registered).total_seconds() > AHEAD
    except (TypeError, ValueError):  # a virtual node has no such times
        return False


@dataclass
class RunLog(Callback):
    """The progress of a run: lines in Flower's log, and the bytes of Flower's records in the run's own."""

    channel: GridChannel
    total: int
    logged: tuple[int, int] = (0, 0)  # bytes of records up and down until the last round

    def on_run_start(self, run: Loop) -> None:
        """Continue the roster of an interrupted run."""
        if self.channel.roster is not None:
            self.channel.roster.belongs(
                run.id
            )  # also if it is decided later whether clients are bound

    def on_round_end(self, run: Loop) -> None:
        """Count the bytes of the records, and note which nodes were refused."""
        now = (self.channel.records_up, self.channel.records_down)
        for name, new, old in zip(("records_up", "records_down"), now, self.logged, strict=True):
            run.carried[name] = run.carried.get(name, 0) + new - old
        self.logged = now
        if self.channel.news:
            run.note([Event("refused", None, text) for text in self.channel.news])
            self.channel.news.clear()

    def warn(self, told: Sequence[str]) -> None:
        """Log what went wrong."""
        for event in told:
            log.warning("fedspan %s", event)

    def on_evaluate(self, run: Loop, row: Row) -> None:
        """After every evaluation."""
        values = "  ".join(
            f"{name} {value[0]:.4g}" for name, value in row.metrics.items() if name not in DETAILS
        )
        sizes = f"{row.up_bytes[0] / 1e6:.3f} MB up  {row.down_bytes[0] / 1e6:.3f} MB down"
        log.info("fedspan round %d of %d  %s  %s", row.round, self.total, values, sizes)


def serve(spec: Spec, grid: Grid, config: RunConfig) -> Result:
    """A whole run from the server's end."""
    if not config.run_dir:
        raise SpecError(
            "run config 'run-dir' is missing: a directory on the server for results and checkpoints"
        )
    refusals.check(spec, server=config)
    run_dir, method = Path(config.run_dir).expanduser(), spec.method
    problem = spec.task.server_problem((spec.seed,), spec)
    refusals.check(spec, problem=problem, server=config)
    clients_per_round = spec.clients_per_round or problem.clients
    if config.min_replies > clients_per_round:
        raise SpecError(
            f"run config 'min-replies' is {config.min_replies}, more than the {clients_per_round} clients of a round"
        )
    chain = Chain.of(spec, method, problem.clients, clients_per_round)
    roster = Roster.at(run_dir / ROSTER) if config.bind_clients else None
    decided = config.bind_clients is True or bool(roster and roster.nodes)
    channel = GridChannel(grid, problem.clients, config.timeout, roster, True if decided else None)
    transport = RemoteTransport(
        method, problem.layout, problem.x0, problem.clients, channel, agreement_of(spec, problem),
        min_replies=config.min_replies, pause=config.pause, backup=config.backup,
        copies_dir=run_dir / "copies", resume=config.resume,
    )  # fmt: skip
    run_log = RunLog(channel, spec.rounds)
    loop = Loop(
        method, problem, transport, (spec.seed,), clients_per_round, (*spec.callbacks, run_log), run_dir,
        chain=chain, known_start=spec.participation.known_start, metrics=spec.metrics,
        unbiased=spec.participation.unbiased, on_events=run_log.warn,
    )  # fmt: skip
    problem.drop_start()
    channel.wait(config.wait)
    # Flower's signal handlers end the app at once; the last checkpoint is there to resume from.
    keeping = Keeping(
        resume=config.resume,
        checkpoint_every=config.checkpoint_every,
        retry_diverged=True,
        signals=False,
    )
    result = execute(loop, spec, keeping)
    log.info("fedspan %s; results in %s", result.status, run_dir)
    return result
