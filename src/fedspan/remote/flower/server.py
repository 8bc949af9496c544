"""The server's end on Flower: messages over Flower's grid to the node of each client, and a whole run."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedspan.core import refusals
from fedspan.core.callback import Callback
from fedspan.core.digest import digest
from fedspan.core.errors import SpecError, client_name, one_line
from fedspan.core.json_log import read_table, write_table
from fedspan.core.method import DETAILS
from fedspan.core.objective import steps_of
from fedspan.core.spec import Spec
from fedspan.data.schema import lines_of
from fedspan.engine.loop import Loop, Row
from fedspan.engine.per_client import Recorder
from fedspan.engine.result import Result
from fedspan.engine.run_dir import execute
from fedspan.nn.problem import TorchProblem
from fedspan.remote.client import NAME
from fedspan.remote.flower.client import IDENTITY, agreement_of
from fedspan.remote.flower.records import RunConfig, read_message, write_message
from fedspan.remote.messages import DroppedError, RoundMessage
from fedspan.remote.roster import ROSTER, Roster
from fedspan.remote.server import RemoteTransport
from fedspan.remote.sites import AGREED, check_agreeing, gather, to_text
from fedspan.replies.chain import Chain, Event

log = logging.getLogger("flwr")
AGREED_FILE = "agreed.json"  # what the clients agreed on before round 0
UNEVEN = 100  # times the median number of local steps above which nobody is believed
GRACE = 1 / 300  # of the timeout: more time for clients that were silent when last asked
REPLY_POLL = 0.1  # seconds between two looks for replies
NODE_POLL = 0.5  # seconds between two looks for clients that are not connected yet
IDENTIFY_TIMEOUT = 60.0  # seconds in which a node must say which client it is
AHEAD = 1.0  # seconds by which a key is registered before its node comes; a node's own takes one message


@dataclass
class GridChannel:
    """Carries messages over Flower's grid, to the node that stands for each client at the time."""

    grid: Grid
    clients: int
    timeout: float
    roster: Roster | None = None  # the node of each client's number; None: the newest node
    auto: bool = False  # whether the roster is kept to only if Flower authenticates nodes

    def __post_init__(self) -> None:
        self.identified = dict[int, int]()  # node → client, the newest last
        self.requests = dict[str, tuple[int, float]]()  # id → (node, deadline)
        self.refused = set[int]()  # nodes
        self.silent = set[int]()  # clients that did not reply when last asked
        self.news = list[str]()  # what happened to nodes since the last round
        self.names = [f"client-{client}" for client in range(self.clients)]  # permanent ones

    @property
    def nodes(self) -> dict[int, int]:
        """Client → the newest node that stands for it."""
        return {client: node for node, client in self.identified.items()}

    def deliver(
        self, messages: list[RoundMessage]
    ) -> Iterator[tuple[int, RoundMessage | DroppedError]]:
        """Send all messages, and yield replies as they arrive until the time is up.

        Once all others have replied, clients that were silent when last asked get as long again as the others took.
        """
        self.find_nodes()
        self.decide_binding()
        nodes, outgoing, indices = self.nodes, [], []
        for index, message in enumerate(messages):
            if (node := nodes.get(message.client)) is None:
                yield index, DroppedError("not connected", sent=False)
                continue
            content, group = write_message(message), str(message.t)
            outgoing.append(Message(content, node, "train", ttl=self.timeout + 60, group_id=group))
            indices.append(index)
        waiting: dict[str, int] = {}
        for ident, index in zip(self.grid.push_messages(outgoing), indices, strict=True):
            if ident:
                waiting[ident] = index
            else:
                yield index, DroppedError("the message could not be sent", sent=False)

        def late() -> set[int]:
            return {messages[index].client for index in waiting.values()}

        began = time.monotonic()
        deadline, others = began + self.timeout, not late() <= self.silent
        while waiting and time.monotonic() < deadline:
            for reply in self.grid.pull_messages(list(waiting)):
                found = waiting.pop(reply.metadata.reply_to_message_id, None)
                if found is not None:
                    self.silent.discard(messages[found].client)
                    yield found, self._read(reply, messages[found].max_reply)
            if others and late() <= self.silent:
                deadline, others = (
                    min(deadline, 2 * time.monotonic() - began + GRACE * self.timeout),
                    False,
                )
            if waiting:
                time.sleep(REPLY_POLL)
        self.silent |= late()

    def _read(self, reply: Message, max_bytes: int) -> RoundMessage | DroppedError:
        if reply.has_error():
            told = f"Flower error {reply.error.code}: {one_line(reply.error.reason)}"
            return DroppedError(told, "other")
        try:
            return read_message(reply.content, max_bytes)
        except Exception as error:  # of whatever kind: it is this client's failure, never the run's
            return DroppedError(f"reply refused: {one_line(error)}", "refused")

    def find_nodes(self) -> None:
        """Request from new nodes which client they are, and read the replies that are there; never waits.

        The newest node stands for a client. A node that does not reply in time gets a new request.
        """
        online, now = set(self.grid.get_node_ids()), time.monotonic()
        self.identified = {node: c for node, c in self.identified.items() if node in online}
        self.requests = {
            ident: (node, deadline)
            for ident, (node, deadline) in self.requests.items()
            if node in online and deadline > now
        }
        asked = {node for node, _ in self.requests.values()}
        new = sorted(online - self.identified.keys() - self.refused - asked)
        queries = [Message(RecordDict(), node, "query", ttl=IDENTIFY_TIMEOUT) for node in new]
        for ident, node in zip(self.grid.push_messages(queries) if new else (), new, strict=True):
            if ident:
                self.requests[ident] = (node, now + IDENTIFY_TIMEOUT)
        for reply in self.grid.pull_messages(list(self.requests)) if self.requests else ():
            request = self.requests.pop(reply.metadata.reply_to_message_id, None)
            if request is None:
                continue
            node, _ = request
            if reply.has_error():
                told = one_line(reply.error.reason)
                log.warning("a node did not say which client it is: %s", told)
                continue
            record = reply.content.get(IDENTITY)
            identity = dict(record) if isinstance(record, ConfigRecord) else {}
            client: Any = identity.get("client")
            name, reason = str(identity.get("name", "")), identity.get("reason")
            if not isinstance(client, int) or not 0 <= client < self.clients:
                own = f"it is client {client!r}, but the run has 0 to {self.clients - 1}"
                reason = reason or own
            elif name in self.names and self.names.index(name) != client:
                reason = (
                    f"client {client} is to be called {name!r}, which is the name of client "
                    f"{self.names.index(name)}; give its node another client-id"
                )
            if reason:
                self.refused.add(node)
                log.warning("fedspan ignores a node: %s", one_line(reason))
                continue
            self.identified[node] = client
            if self._admits(node) and NAME.fullmatch(name):
                self.names[client] = name

    def _admits(self, node: int) -> bool:
        """Whether a node may stand for its client; one of another node's client is refused."""
        client = self.identified[node]
        if self.roster is None or self.auto or self.roster.admits(client, node):
            return True
        del self.identified[node]
        self.refused.add(node)
        self.news.append(
            f"node {node} is refused as {client_name(client, self.names)}, which belongs to another node"
        )
        return False

    def decide_binding(self) -> None:
        """Bind clients to nodes if Flower authenticates these; decided once, when some are connected."""
        if not self.auto or not self.identified:
            return
        known = [_registered_before(node) for node in getattr(self.grid, "get_nodes", tuple)()]
        self.auto = False
        if 2 * sum(known) > len(known):
            log.info("nodes are authenticated, so clients are bound to them")
            for node in list(self.identified):
                self._admits(node)
        else:
            log.info("nodes are not authenticated, so clients are not bound to them")
            self.roster = None

    def wait(self, seconds: float) -> None:
        """Wait until all clients are connected or the time is up."""
        deadline = time.monotonic() + seconds
        self.find_nodes()
        while len(self.nodes) < self.clients and time.monotonic() <= deadline:
            time.sleep(NODE_POLL)
            self.find_nodes()
        self.decide_binding()
        log.info("%d of %d clients are connected", len(self.nodes), self.clients)


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
    """The progress of a run as lines in Flower's log, and what happened to nodes in the run's own."""

    channel: GridChannel
    agreed: dict[str, Any]

    def on_run_start(self, run: Loop) -> None:
        """Continue the roster of an interrupted run, and keep and log what the clients agreed on."""
        for line in lines_of(run.problem.usage):
            log.info("fedspan %s", line)
        if self.agreed and run.run_dir is not None:
            write_table(run.run_dir / AGREED_FILE, self.agreed)
        if self.channel.roster is not None:  # also if it is decided later whether clients are bound
            self.channel.roster.belongs(run.id)

    def on_round_end(self, run: Loop) -> None:
        """Note which nodes were refused."""
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
            f"{name} {value[0]:.4g}"
            for name, value in row.metrics.items()
            if name not in DETAILS and not name.startswith(("clients_", "worst_"))
        )
        sizes = f"{row.up_bytes[0] / 1e6:.3f} MB up  {row.down_bytes[0] / 1e6:.3f} MB down"
        log.info("fedspan round %d of %d  %s  %s", row.round, run.rounds, values, sizes)


def serve(spec: Spec, grid: Grid, config: RunConfig) -> Result:
    """A whole run from the server's end."""
    if not config.run_dir:
        raise SpecError(
            "run config 'run-dir' is missing: a directory on the server for results and checkpoints"
        )
    refusals.check(spec, server=config)
    run_dir, method = Path(config.run_dir).expanduser(), spec.method
    roster = Roster.at(run_dir / ROSTER) if config.bind_clients else None
    auto = config.bind_clients == "auto" and roster is not None and not roster.nodes

    # --- What the clients agree on before round 0 ---
    check_agreeing(spec)
    asked, problem = spec.task.of_sites, None
    if asked is None:
        problem = spec.task.server_problem((spec.seed,), spec)
    count = problem.clients if problem is not None else spec.task.partition.clients  # type: ignore[attr-defined]
    if count is None:
        raise SpecError(
            'a server has to know how many clients there are; set task.partition = {name = "natural", clients = 3}'
        )
    channel = GridChannel(grid, count, config.timeout, roster, auto)
    channel.wait(config.wait)
    weighted = spec.participation.weights == "examples" and (
        problem is None or isinstance(problem, TorchProblem)
    )
    agreed: dict[str, Any] = {}
    if weighted or asked is not None or spec.training.per_client:
        kept = run_dir / AGREED_FILE
        if config.resume and kept.exists():
            agreed = read_table(kept, {"examples": list[int]})
        else:
            patience = max(config.wait, 1.0)
            fingerprint = digest(spec.identity(), size=6)
            agreed = gather(channel, channel.names, fingerprint, patience, asked, spec.secure)
        if len(agreed["examples"]) != count:
            raise SpecError(f"{str(kept)!r} is of {len(agreed['examples'])} clients, not {count}")
    if problem is None:
        problem = spec.task.server_problem((spec.seed,), spec, agreed)
    if weighted:
        problem.weights = spec.participation.shares(np.array(agreed["examples"], np.float64))
    if spec.epochs is not None and spec.training.per_client:
        few = np.array(agreed["examples"]) / spec.examples_per_batch
        problem.steps = steps_of(spec.epochs, agreed.get("batches", few))
        most = int(problem.steps.argmax())
        if problem.steps[most] > UNEVEN * np.median(problem.steps):
            raise SpecError(
                f"{client_name(most, channel.names)} would take {problem.steps[most]:,} local steps, over {UNEVEN} "
                "times the median: its number of examples, by which all clients' steps are scaled, may be wrong; check "
                "it, or leave out `training.per_client`"
            )
    if spec.federation is not None:
        log.info(
            "`federation` is a virtual clock of the simulator; here the clients' links are real"
        )
    names = channel.names
    problem.names = names
    refusals.check(spec, problem=problem, server=config)
    clients_per_round = spec.clients_per_round or problem.clients
    if config.min_replies > clients_per_round:
        raise SpecError(
            f"run config 'min-replies' is {config.min_replies}, more than the {clients_per_round} clients of a round"
        )
    chain = Chain.of(spec, method, problem.clients, clients_per_round)
    transport = RemoteTransport(
        method, problem.layout, problem.x0, problem.clients, channel, agreement_of(spec, problem),
        min_replies=config.min_replies, pause=config.pause, backup=config.backup,
        copies_dir=run_dir / "copies", resume=config.resume,
        agreed={AGREED: to_text(agreed)} if asked is not None else {},
    )  # fmt: skip
    run_log = RunLog(channel, agreed)
    more: list[Callback] = [run_log, *spec.callbacks]
    if spec.eval_clients_every is not None:
        every = spec.eval_clients_every
        more.append(
            Recorder(
                every, spec.rounds, transport.evaluate, lambda line: log.info("fedspan %s", line)
            )
        )
    loop = Loop(
        method, problem, transport, (spec.seed,), clients_per_round, more, run_dir,
        chain=chain, known_start=spec.participation.known_start, metrics=spec.metrics,
        unbiased=spec.participation.unbiased, on_events=run_log.warn,
    )  # fmt: skip
    problem.drop_start()
    # Flower's signal handlers end the app at once; the last checkpoint is there to resume from.
    result = execute(
        loop,
        spec,
        resume=config.resume,
        checkpoint_every=config.checkpoint_every,
    )
    log.info("fedspan %s; results in %s", result.status, run_dir)
    return result
