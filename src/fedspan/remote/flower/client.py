"""The client's end on Flower: which client a node stands for, and its reply to a message."""

from __future__ import annotations

import functools
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from fedspan.core.config import Participation
from fedspan.core.digest import digest, digest_of_arrays
from fedspan.core.errors import DataError, FedspanError, ProtocolError, SpecError, one_line
from fedspan.core.files import write_atomic
from fedspan.core.objective import Problem, steps_of
from fedspan.core.privacy import Privacy
from fedspan.core.round import Terms
from fedspan.core.spec import Spec, read_toml, with_changes
from fedspan.core.terminal import log
from fedspan.remote.client import RemoteClient, StateFile, answer_before
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
    BEFORE,
    DESCRIBE,
    KNOWN_START,
    SUMS,
    Agreement,
    DroppedError,
    RoundMessage,
)
from fedspan.remote.sites import AGREED, MOST, from_text

IDENTITY, UNKNOWN = "identity", -1
App = Spec | Path | str  # the app's own spec, or its file
SERVER_ONLY = {
    "eval_every", "metrics", "clients_per_round", "participation", "callbacks", "search",
}  # fmt: skip
TEXTS = {  # settings of a node's own config, and what to write
    "module": "give an import name or a path ending in .py",
    "privacy": "write a table in quotes, such as '{secure = true}'",
    "data": "give the path of the file with this client's rows",
    "metrics": 'name them in one text, such as "accuracy,auroc"',
    "identity-key": "give the path of a file",
    "roster": "give the path of a file",
}


def identify(context: Context) -> RecordDict:
    """Which client this node stands for, or why that is unknown."""
    try:
        client, reason, name = client_of(context), "", name_of(context)
    except FedspanError as error:
        client, reason, name = UNKNOWN, one_line(error), ""
    return RecordDict({IDENTITY: ConfigRecord({"client": client, "reason": reason, "name": name})})


def reply_to(message: Message, context: Context, app: App) -> RecordDict:
    """The reply to a message; any error on this side becomes a refusal with its reason."""
    reply, asked = RoundMessage("refused", UNKNOWN, UNKNOWN, UNKNOWN, ""), None
    try:
        config, client = RunConfig.read(context.run_config), client_of(context)
        own = (
            module_of(context),
            text_in(context, "privacy"),
            text_in(context, "data"),
            named(context),
        )
        asked = RoundMessage.read(dict(message.content.config_records[HEADER]), {})
        reply = replace(reply, t=asked.t, client=client, accepted=asked.accepted, mark=asked.mark)
        node = context.node_config
        states = node.get("states-dir") or os.environ.get("FEDSPAN_STATES") or "~/.fedspan/states"
        state_file = StateFile.of(Path(str(states)).expanduser(), config.run_name, name_of(context))
        if asked.status in (DESCRIBE, SUMS) or asked.t == BEFORE:
            asked = read_message(message.content, MOST)
            spec, _ = prepare(app, config.changes, *own)
            identity = identity_of(spec.secure, context)
            found = answer_before(asked, spec, client, state_file, identity)
            return write_message(replace(asked, status="ok", arrays=found))
        agreed = _agreed(message.content, state_file.path.with_suffix(".agreed"))
        spec, problem = prepare(app, config.changes, *own, client, agreed)
        asked = read_message(message.content, max_bytes(problem))
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
            text_in(context, "metrics") if "metrics" in node else None,
        )
        return write_message(client_end.reply(asked))
    except Exception as error:  # a hostile download is refused like any other that cannot be read
        status = "lost" if isinstance(error, DroppedError) else "refused"
        reason = one_line(error)
        if asked is not None and asked.t == BEFORE:  # about a table: no cell and no path may leave
            log.error("fedspan refuses %r: %s", asked.status, reason)
            told = error.told if isinstance(error, DataError) else str(error)
            known = isinstance(error, FedspanError)
            reason = one_line(told) if known else type(error).__name__
            path = text_in(context, "data")
            for text in filter(None, (path, str(Path(path).expanduser()) if path else "")):
                reason = reason.replace(repr(text), "its file").replace(text, "its file")
            reason += "" if known and told == str(error) else "; the log of this client says more"
        return write_message(replace(reply, status=status, reason=reason))


@functools.lru_cache(maxsize=4)  # for all messages that one process replies to
def prepare(
    app: App,
    changes: tuple[str, ...],
    module: str = "",
    privacy: str = "",
    data: str = "",
    name: str = "",
    client: int | None = None,
    agreed: str = "",
) -> tuple[Spec, Any]:
    """The spec of a run as a client takes it, and its problem; see `permissions` for what the changes may do.

    Args:
        app: The app's own spec, or its file.
        changes: The submitter's changes.
        module: The module of the node's config; "" if it names none.
        privacy: The floor of the node's config; "" if it has none.
        data: The file with this client's rows, from the node's config; "" if it names none.
        name: The client's name in the node's config; "" if it has none.
        client: Its number; without it there is no problem.
        agreed: What the clients agreed on before round 0; "" if it is not known.
    """
    whole = app if isinstance(app, Spec) else None
    own = read_toml(Path(str(app))) if whole is None else whole.table()
    if whole is not None and not changes and not module:
        spec = whole
    else:
        spec = Spec.from_table(permitted(own, with_changes(own, changes), module))
    sites = spec.task.of_sites
    if data and sites is not None:
        own_file = replace(sites, own_file=str(Path(data).expanduser()), own_name=name or None)
        spec = replace(spec, task=replace(cast(Any, spec.task), data=own_file))
    if privacy:
        check_floor(spec, privacy_of(privacy), None)
    if own.get("privacy"):
        mine = whole or Spec.from_table(own)
        check_floor(spec, mine.privacy, mine)
    if client is None:
        return spec, None
    if sites is not None and not agreed:
        why = "this client does not have what the clients agreed on before round 0"
        raise DroppedError(why, "state lost")
    known = [] if sites is None else [json.loads(agreed)]
    with torch.inference_mode(False):
        problem = spec.task.client_problem(client, (spec.seed,), spec, *known)
    if spec.epochs is not None and spec.training.per_client:
        steps = steps_of(spec.epochs, [problem.batches_of(client)])
        problem.steps = steps.repeat(problem.clients)  # of the others nothing is known here
    return spec, problem


def _agreed(content: RecordDict, file: Path) -> str:
    """What the clients agreed on before round 0, from the message if it brings it, else from disk; "" without."""
    records = content.array_records[ARRAYS]
    pieces = {key: records[key] for key in records if key.partition(PART)[0] == AGREED}
    if pieces:
        if sum(len(piece.data) for piece in pieces.values()) > MOST:
            raise ProtocolError(f"what was agreed on has more than {MOST:,} bytes")
        found = read_arrays(ArrayRecord(pieces))[AGREED]
        from_text(found)
        write_atomic(file, found.numpy().tobytes())
    return file.read_text("utf-8") if file.exists() else ""


def load_spec(app: App, changes: tuple[str, ...]) -> Spec:
    """The spec of a run with its changes applied."""
    if not isinstance(app, Spec):
        return Spec.load(app, changes)
    return Spec.from_table(with_changes(app.table(), changes)) if changes else app


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
    return named(context) or f"client-{client_of(context)}"


def named(context: Context) -> str:
    """The name that a node's config gives the client; "" if it has none."""
    return str(context.node_config.get("client-id", ""))


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
    files = [text_in(context, name) for name in ("identity-key", "roster")]
    if secure is None or not secure.secure_signed or not all(files):
        return None
    from fedspan.replies.secure.identity import Identity  # needs a library

    return Identity.read(*(Path(file).expanduser() for file in files))


def module_of(context: Context) -> str:
    """The module that a node itself chose for its model and data; "" where it did not."""
    given = text_in(context, "module")
    return str(Path(given).expanduser()) if given.endswith(".py") else given


def text_in(context: Context, name: str) -> str:
    """A text of the node's own config; "" where it is not given."""
    given = context.node_config.get(name, "")
    if not isinstance(given, str):
        raise SpecError(f"the node's config has {name} = {given!r}; {TEXTS[name]}")
    return given
