"""The client's end on Flower: which client a node stands for, and its reply to a message."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from fedspan.core.config import Participation
from fedspan.core.digest import digest, digest_of_arrays
from fedspan.core.errors import FedspanError, ProtocolError, SpecError, one_line
from fedspan.core.files import write_atomic
from fedspan.core.objective import Problem, steps_of
from fedspan.core.privacy import Privacy
from fedspan.core.round import Terms
from fedspan.core.spec import Spec, read_toml, with_changes
from fedspan.remote.client import RemoteClient, StateFile
from fedspan.remote.flower.permissions import check_floor, permitted, privacy_of
from fedspan.remote.flower.records import (
    ARRAYS,
    HEADER,
    PART,
    RunConfig,
    max_bytes,
    read_arrays,
    read_message,
    write_message,
)
from fedspan.remote.messages import (
    DESCRIBE,
    KNOWN_START,
    MAX_REASON,
    SUMS,
    Agreement,
    RoundMessage,
)
from fedspan.remote.sites import AGREED, MOST, TEXT, from_text, to_text

IDENTITY, UNKNOWN = "identity", -1
SERVER_ONLY = {
    "eval_every",
    "metrics",
    "clients_per_round",
    "participation",
    "callbacks",
    "search",
}
Prepare = Callable[..., tuple[Spec, Problem | None]]
# (changes of the spec, client, the node's own module, privacy and data, what was agreed on) → what it computes with


def identify(context: Context) -> RecordDict:
    """Which client this node stands for, or why that is unknown."""
    try:
        client, reason, name = client_of(context), "", name_of(context)
    except FedspanError as error:
        client, reason, name = UNKNOWN, str(error)[:MAX_REASON], ""
    known = ConfigRecord({"client": client, "reason": reason, "name": name})
    return RecordDict({IDENTITY: known})


def reply_to(message: Message, context: Context, prepare: Prepare) -> RecordDict:
    """The reply to a message; any error on this side becomes a refusal with its reason."""
    try:
        config, client, node = (
            RunConfig.read(context.run_config),
            client_of(context),
            context.node_config,
        )
        own = (
            module_of(context),
            text_in(context, "privacy", "write a table in quotes, such as '{secure = true}'"),
            text_in(context, "data", "give the path of the file with this client's rows"),
        )
        header = dict(cast(ConfigRecord, message.content[HEADER]))
        if header.get("status") in (DESCRIBE, SUMS):
            received = read_message(message.content, MOST)
            spec = prepare(config.changes, None, *own, "")[0]
            return write_message(_about_data(spec, client, received))
        states = node.get("states-dir") or os.environ.get("FEDSPAN_STATES") or "~/.fedspan/states"
        state_file = StateFile.of(Path(str(states)).expanduser(), config.run_name, name_of(context))
        agreed = _agreed(message.content, state_file.path.with_suffix(".agreed"))
        spec, problem = prepare(config.changes, client, *own, agreed)
        if problem is None:
            lost = {key: header[key] for key in ("t", "client", "accepted", "mark")}
            why = "this client does not have what the clients agreed on before round 0"
            fingerprint = str(header.get("fingerprint", ""))
            return write_message(
                RoundMessage("lost", fingerprint=fingerprint, reason=why, **cast(Any, lost))
            )
        received = read_message(message.content, max_bytes(problem))
        terms = None
        if spec.dp is not None and spec.dp.level == "client":  # else its gradients have the noise
            terms = Terms(spec.dp.clip or 0.0, spec.dp.leak)
        client_end = RemoteClient(
            spec.method,
            problem,
            state_file,
            client,
            spec.seed,
            agreement_of(spec, problem),
            spec.rounds,
            terms,
            spec.participation.known_start,
            spec.secure,
            identity_of(spec.secure, context),
            spec.participation.weights == "examples",
            text_in(context, "metrics", 'name them in one text, such as "accuracy,auroc"')
            if "metrics" in node
            else None,
        )
        reply = client_end.reply(received)
    except Exception as error:  # a hostile download is refused like any other that cannot be read
        reply = RoundMessage(
            "refused", UNKNOWN, UNKNOWN, UNKNOWN, "", reason=one_line(error, MAX_REASON)
        )
    return write_message(reply)


def preparing(spec: Spec | Path | str) -> Prepare:
    """A function that loads the spec and builds a client's problem; Flower's simulation sends it to other processes."""
    return functools.partial(_prepare, spec)


@functools.lru_cache(maxsize=4)  # for all messages that one process replies to
def _prepare(
    spec: Spec | Path | str,
    changes: tuple[str, ...],
    client: int | None,
    module: str,
    privacy: str,
    data: str,
    agreed: str,
) -> tuple[Spec, Problem | None]:
    changed = client_spec(spec, changes, module, privacy, data)
    if client is None or (changed.task.of_sites is not None and not agreed):
        return changed, None
    seeds, known = (changed.seed,), json.loads(agreed) if agreed else None
    with torch.inference_mode(False):
        more = () if changed.task.of_sites is None else (known,)
        problem = changed.task.client_problem(client, seeds, changed, *more)
    if changed.epochs is not None and changed.training.per_client:
        own = steps_of(changed.epochs, [problem.batches_of(client)])
        problem.steps = own.repeat(problem.clients)  # of the others nothing is known here
    return changed, problem


def _about_data(spec: Spec, client: int, message: RoundMessage) -> RoundMessage:
    """The answer to a question about a client's own data, before round 0."""
    reply = replace(message, arrays={})
    try:
        asked = from_text(message.arrays.get(TEXT))
        if message.status == DESCRIBE:
            found: Any = spec.task.describe(client, (spec.seed,), spec)
        else:
            found = spec.task.sums(client, spec.seed, asked["schema"], bool(asked["about"]))
    except FedspanError as error:
        return replace(reply, status="failed", reason=one_line(error, MAX_REASON))
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        return replace(reply, status="refused", reason=one_line(error, MAX_REASON))
    return replace(reply, status="ok", arrays={TEXT: to_text(found)})


def _agreed(content: RecordDict, file: Path) -> str:
    """What the clients agreed on before round 0, from the message if it brings it, else from disk; "" without."""
    records = cast(ArrayRecord, content[ARRAYS])
    pieces = {key: records[key] for key in records if key.partition(PART)[0] == AGREED}
    if pieces:
        if sum(len(piece.data) for piece in pieces.values()) > MOST:
            raise ProtocolError(f"what was agreed on has more than {MOST:,} bytes")
        found = read_arrays(ArrayRecord(pieces))[AGREED]
        from_text(found)
        write_atomic(file, found.numpy().tobytes())
    return file.read_text("utf-8") if file.exists() else ""


def load_spec(spec: Spec | Path | str, changes: tuple[str, ...]) -> Spec:
    """The spec of a run with its changes applied."""
    if not isinstance(spec, Spec):
        return Spec.load(spec, changes)
    return Spec.from_table(with_changes(spec.table(), changes)) if changes else spec


def client_spec(
    spec: Spec | Path | str,
    changes: tuple[str, ...],
    module: str = "",
    privacy: str = "",
    data: str = "",
) -> Spec:
    """The spec of a run as a client takes it; see `permissions` for what the submitter's changes may do.

    Args:
        spec: The app's own spec, or its file.
        changes: The submitter's changes.
        module: The module of the node's config; "" if it names none.
        privacy: The floor of the node's config; "" if it has none.
        data: The file with this client's rows, from the node's config; "" if it names none.
    """
    own = spec.table() if isinstance(spec, Spec) else read_toml(Path(spec))
    if isinstance(spec, Spec) and not changes and not module:
        run = spec
    else:
        run = Spec.from_table(permitted(own, with_changes(own, changes), module))
    if data and run.task.of_sites is not None:
        own_file = replace(run.task.of_sites, own_file=str(Path(data).expanduser()))
        run = replace(run, task=replace(cast(Any, run.task), data=own_file))
    if privacy:
        check_floor(run, privacy_of(privacy), None)
    if own.get("privacy"):
        mine = spec if isinstance(spec, Spec) else Spec.from_table(own)
        check_floor(run, mine.privacy, mine)
    return run


def agreement_of(spec: Spec, problem: Problem) -> Agreement:
    """What server and clients must have in common: not what only the server uses, nor where a client's files are."""
    settings = {key: value for key, value in spec.decisions().items() if key not in SERVER_ONLY}
    settings["task"] = {key: value for key, value in settings["task"].items() if key != "module"}
    if spec.task.of_sites is not None:  # each client has a file of its own
        own = {k: v for k, v in settings["task"]["data"].items() if k != "digest"}
        known = json.dumps([problem.usage["schema"], problem.usage["classes"]], sort_keys=True)
        settings["task"] |= {"data": own, "features": digest(known)}
    if spec.secure is not None and spec.participation.weights != Participation.weights:
        settings["participation.weights"] = spec.participation.weights
    if spec.participation.known_start and spec.method.logs_changes:
        settings[KNOWN_START] = _start_of(problem)
    return Agreement.of(settings, problem.layout, spec.seed)


@functools.lru_cache(maxsize=4)  # for all messages that one process replies to
def _start_of(problem: Problem) -> str:
    return digest_of_arrays({"x": problem.x0})


def name_of(context: Context) -> str:
    """The permanent name of a client, which is that of its state file."""
    return str(
        context.node_config.get("client-id", f"client-{context.node_config['partition-id']}")
    )


def client_of(context: Context) -> int:
    """The client that a node stands for, 0 to N - 1."""
    number = context.node_config.get("partition-id")
    if not isinstance(number, int) or number < 0:
        raise SpecError(
            f"the node's config needs partition-id, a whole number from 0, got {number!r}"
        )
    return number


def identity_of(secure: Privacy | None, context: Context) -> Any:
    """By which a node signs its keys of secure sums, from its own config; None where they are not signed."""
    if secure is None or not secure.secure_signed:
        return None
    from fedspan.replies.secure.identity import Identity  # needs a library

    key, roster = (context.node_config.get(name) for name in ("identity-key", "roster"))
    if not isinstance(key, str) or not isinstance(roster, str):
        raise SpecError(
            "`privacy.secure_signed` needs identity-key and roster in the node's config: two files"
        )
    return Identity.read(Path(key).expanduser(), Path(roster).expanduser())


def module_of(context: Context) -> str:
    """The module that a node itself chose for its model and data; "" where it did not."""
    given = text_in(context, "module", "give an import name or a path ending in .py")
    return str(Path(given).expanduser()) if given.endswith(".py") else given


def text_in(context: Context, name: str, remedy: str) -> str:
    """A text of the node's own config; "" where it is not given."""
    given = context.node_config.get(name, "")
    if not isinstance(given, str):
        raise SpecError(f"the node's config has {name} = {given!r}; {remedy}")
    return given
