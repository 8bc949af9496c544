"""fedspan on Flower: the same loop and the same client end, with letters as Flower messages.

    app = server_app("spec.toml")        app = client_app("spec.toml")

Both ends read the same spec. A client is known by its number (`partition-id` in the node's config) and a name that
stays (`client-id`, else `client-<number>`), whatever node id Flower gives it. Its state is kept in a folder of its own
machine.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
except ImportError as missing:
    from fedspan.core.errors import FedspanError

    raise FedspanError("Flower is not installed; pip install 'fedspan[flower]'") from missing

from fedspan.core.checkpoint import write_atomic
from fedspan.core.errors import FedspanError, ProtocolError, SpecError
from fedspan.core.layout import DTYPES
from fedspan.experiment import Spec, with_changes
from fedspan.runtimes.folder import Result, carry_out
from fedspan.runtimes.letters import Letter
from fedspan.runtimes.loop import Loop, Row, over_epochs
from fedspan.runtimes.remote import Remote
from fedspan.runtimes.site import Site, Store

log = logging.getLogger("flwr")
HEADER, ARRAYS, WHO = "header", "arrays", "who"
KINDS = {"float32", "float64", "float16", "uint8", "int16", "int32", "int64"}  # bfloat16 travels as int16
POLL = 0.1  # seconds between two looks for replies
LOOK = 0.5  # between two looks for clients that are not there yet
ASK = 60.0  # seconds in which a node must say which client it is
Config = dict[str, Any]
SETTINGS: Config = {
    "set": "", "out": "", "run": "run", "resume": False, "timeout": 600.0, "wait": 120.0, "minimum": 1,
    "cast": "float32", "backup": True, "checkpoint-every": 1, "states": "",
}  # fmt: skip


def settings_of(config: Any) -> Config:
    """The run's settings: what `flwr run --run-config` says, else what is usual."""
    found = {name: config.get(name, usual) for name, usual in SETTINGS.items()}
    for name, usual in SETTINGS.items():
        value = found[name]
        if type(usual) is float and type(value) is int:
            found[name] = float(value)
        elif type(value) is not type(usual):
            raise SpecError(f"run config {name!r} must be {type(usual).__name__}, got {value!r}")
    return found


def spec_of(spec: Spec | Path | str, settings: Config) -> Spec:
    """The spec of a run, with the changes of `set` ("method.lr=0.1; rounds=5") applied."""
    changes = tuple(part.strip() for part in settings["set"].split(";") if part.strip())
    if isinstance(spec, Spec):
        return Spec.from_table(with_changes(spec.table(), changes)) if changes else spec
    return Spec.load(Path(spec), changes)


# ---- letters as Flower messages


def record_of(letter: Letter) -> RecordDict:
    """A letter as Flower's records."""
    arrays = {}
    for name, tensor in letter.arrays.items():
        plain = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
        arrays[name] = Array(plain.detach().contiguous().numpy())
    return RecordDict({HEADER: ConfigRecord(letter.header()), ARRAYS: ArrayRecord(arrays)})


def letter_of(content: RecordDict, limit: int) -> Letter:
    """A letter from Flower's records; sizes and types are looked at before any array is made."""
    try:
        header, records = dict(content[HEADER]), content[ARRAYS]
    except KeyError:
        raise ProtocolError("the message is not one of fedspan's") from None
    assert isinstance(records, ArrayRecord)
    total = sum(len(array.data) for array in records.values())
    if total > limit:
        raise ProtocolError(f"the message has {total:,} bytes of arrays; at most {limit:,} are taken")
    arrays = {}
    for name, array in records.items():
        if array.dtype not in KINDS or array.stype != "numpy.ndarray":
            raise ProtocolError(
                f"array {name!r:.40} is of type {array.dtype!r:.40}; one of {', '.join(sorted(KINDS))} is taken"
            )
        tensor = torch.from_numpy(array.numpy().copy())
        short = header.get("cast") == "bfloat16" and tensor.dtype == torch.int16
        arrays[name] = tensor.view(torch.bfloat16) if short else tensor
    return Letter.read(header, arrays)


def _limit(size: int, element: int) -> int:
    """No honest letter is longer: the model, two states of its size, a log of at most its size, and some headers."""
    return 8 * size * element + (1 << 16)


# ---- the server


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

    def deliver(self, letters: list[Letter]) -> Iterator[tuple[int, Letter | str]]:
        """Send all, and yield replies as they come until the time is up."""
        self.look()
        messages, numbers = [], []
        for number, letter in enumerate(letters):
            node = self.nodes.get(letter.client)
            if node is None:
                yield number, "not connected"
                continue
            content = record_of(letter)
            self.wire_down += _records(content)
            messages.append(Message(content, node, "train", ttl=self.timeout + 60, group_id=str(letter.t)))
            numbers.append(number)
        waiting = dict(zip(self.grid.push_messages(messages), numbers, strict=True))
        for number in [n for i, n in waiting.items() if not i]:
            yield number, "the message could not be sent"
        for ident, message in self._replies([i for i in waiting if i], self.timeout):
            yield waiting[ident], self._read(message)

    def _read(self, message: Message) -> Letter | str:
        if message.has_error():
            return f"Flower error {message.error.code}: {message.error.reason}"
        self.wire_up += _records(message.content)
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
        client = message.content[WHO]["client"] if WHO in message.content else None
        if isinstance(client, int) and 0 <= client < self.clients:
            self.told[node] = client
        else:
            self.refused.add(node)
            log.warning("a node says it is client %r, but the run has clients 0 to %d", client, self.clients - 1)

    def wait(self, seconds: float) -> None:
        """Until all clients are connected, or the time is up."""
        until = time.monotonic() + seconds
        while True:
            self.look()
            if len(self.nodes) >= self.clients or time.monotonic() > until:
                log.info("%d of %d clients are connected", len(self.nodes), self.clients)
                return
            time.sleep(LOOK)


def _records(content: RecordDict) -> int:
    """Bytes of a message's records: arrays with Flower's own headers, and ours as text."""
    arrays, header = content.get(ARRAYS), content.get(HEADER)
    sized = arrays.count_bytes() if isinstance(arrays, ArrayRecord) else 0
    return sized + (len(json.dumps(dict(header))) if isinstance(header, ConfigRecord) else 0)


def serve(spec: Spec, grid: Grid, settings: Config) -> Result:
    """A whole run from the server's end."""
    if not settings["out"]:
        raise SpecError("run config 'out' is missing: a folder for the server's results and checkpoints")
    out = Path(settings["out"]).expanduser()
    seeds = (spec.seed,)
    problem = spec.task.centre(seeds, DTYPES[spec.dtype], spec.participation.weights)
    if spec.epochs is not None:
        raise SpecError(
            "`epochs` needs the clients' amounts of data, which a server does not have; give method.local_steps"
        )
    method = over_epochs(spec.method, problem, None)
    limit = _limit(problem.layout.size, problem.x0.element_size())
    link = GridLink(grid, problem.clients, settings["timeout"], limit)
    end = Remote(
        method, problem.layout, problem.x0, problem.clients, link, spec.seed, minimum=settings["minimum"],
        cast=settings["cast"], backup=settings["backup"], folder=out / "copies", resume=settings["resume"],
    )  # fmt: skip
    loop = Loop(method, problem, end, seeds, spec.participation.per_round or problem.clients)
    link.wait(settings["wait"])

    def show(row: Row) -> None:
        values = "  ".join(f"{name} {value[0]:.4g}" for name, value in row.metrics.items())
        sizes = f"{row.up_bytes[0] / 1e6:.3f} MB up  {row.down_bytes[0] / 1e6:.3f} MB down"
        log.info("fedspan round %d of %d  %s  %s", row.round, spec.rounds, values, sizes)
        for event in row.events:
            log.warning("fedspan %s", event)

    result = carry_out(
        loop, spec.table(), out, resume=settings["resume"], on_row=show, every=settings["checkpoint-every"]
    )
    last = result.rows[0][-1]
    wired = {"payload_up": last["up_bytes"], "payload_down": last["down_bytes"]}
    wired |= {"records_up": link.wire_up, "records_down": link.wire_down}
    write_atomic(out / "bytes.json", json.dumps(wired, indent=1).encode())
    log.info("fedspan %s after round %d; results in %s", result.status(0), last["round"], out)
    return result


def server_app(spec: Spec | Path | str) -> ServerApp:
    """A Flower ServerApp that carries out a spec."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            settings = settings_of(context.run_config)
            with torch.inference_mode(False):
                serve(spec_of(spec, settings), grid, settings)
        except FedspanError as error:
            log.error("fedspan error: %s", error)
            raise SystemExit(2) from None

    return app


# ---- the client


def client_app(spec: Spec | Path | str) -> ClientApp:
    """A Flower ClientApp that answers for the client its node's config names."""
    app = ClientApp()

    @app.query()
    def who(message: Message, context: Context) -> Message:
        return Message(RecordDict({WHO: ConfigRecord({"client": number_of(context)})}), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        settings = settings_of(context.run_config)
        resolved = spec_of(spec, settings)
        client = number_of(context)
        name = str(context.node_config.get("client-id", f"client-{client}"))
        method, problem = _ready(json.dumps(resolved.table(), sort_keys=True), client)
        limit = _limit(problem.layout.size, problem.x0.element_size())
        try:
            letter = letter_of(message.content, limit)
            store = Store.of(states_folder(context, settings), settings["run"], name)
            reply = Site(method, problem, store, client, resolved.seed).answer(letter)
        except FedspanError as error:
            nobody = Letter("refused", -1, client, -1, "", reason=str(error)[:300])
            reply = nobody
        return Message(record_of(reply), reply_to=message)

    return app


@functools.lru_cache(maxsize=4)
def _ready(table: str, client: int) -> tuple[Any, Any]:
    """Method and problem of a client; kept where one process answers several letters."""
    spec = Spec.from_table(json.loads(table))
    with torch.inference_mode(False):
        problem = spec.task.site(client, (spec.seed,), DTYPES[spec.dtype])
    return spec.method, problem


def number_of(context: Context) -> int:
    """Which of the N clients a node is."""
    number = context.node_config.get("partition-id")
    if not isinstance(number, int) or number < 0:
        raise SpecError(f"the node's config needs partition-id, a whole number from 0, got {number!r}")
    return number


def states_folder(context: Context, settings: Config) -> Path:
    """Where a node keeps its client's state: its own config, the environment, the run's config, or the home folder."""
    named = context.node_config.get("states") or os.environ.get("FEDSPAN_STATES") or settings["states"]
    return Path(str(named)).expanduser() if named else Path.home() / ".fedspan" / "states"
