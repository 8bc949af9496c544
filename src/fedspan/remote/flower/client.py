"""The client's end on Flower: which client a node stands for, and its reply to a message."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedspan.core.config import Participation
from fedspan.core.digest import digest_of_arrays
from fedspan.core.errors import FedspanError, SpecError, one_line
from fedspan.core.objective import Problem
from fedspan.core.privacy import Privacy
from fedspan.core.round import Terms
from fedspan.core.spec import Spec, read_toml, with_changes
from fedspan.remote.client import RemoteClient, StateFile
from fedspan.remote.flower.permissions import check_floor, permitted, privacy_of
from fedspan.remote.flower.records import RunConfig, max_bytes, read_message, write_message
from fedspan.remote.messages import KNOWN_START, MAX_REASON, Agreement, RoundMessage

IDENTITY, UNKNOWN = "identity", -1
SERVER_ONLY = {
    "eval_every",
    "metrics",
    "clients_per_round",
    "participation",
    "callbacks",
    "search",
}
Prepare = Callable[
    [tuple[str, ...], int, str, str], tuple[Spec, Problem]
]  # (changes of the spec, client, the node's own module and privacy) → what it computes with


def identify(context: Context) -> RecordDict:
    """Which client this node stands for, or why that is unknown."""
    try:
        client, reason = client_of(context), ""
    except FedspanError as error:
        client, reason = UNKNOWN, str(error)[:MAX_REASON]
    return RecordDict({IDENTITY: ConfigRecord({"client": client, "reason": reason})})


def reply_to(message: Message, context: Context, prepare: Prepare) -> RecordDict:
    """The reply to a message; any error on this side becomes a refusal with its reason."""
    try:
        config, client, node = (
            RunConfig.read(context.run_config),
            client_of(context),
            context.node_config,
        )
        floor = text_in(context, "privacy", "write a table in quotes, such as '{secure = true}'")
        spec, problem = prepare(config.changes, client, module_of(context), floor)
        received = read_message(message.content, max_bytes(problem))
        states = node.get("states-dir") or os.environ.get("FEDSPAN_STATES") or "~/.fedspan/states"
        state_file = StateFile.of(
            Path(str(states)).expanduser(),
            config.run_name,
            str(node.get("client-id", f"client-{client}")),
        )
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
    spec: Spec | Path | str, changes: tuple[str, ...], client: int, module: str, privacy: str
) -> tuple[Spec, Problem]:
    changed = client_spec(spec, changes, module, privacy)
    with torch.inference_mode(False):
        return changed, changed.task.client_problem(client, (changed.seed,), changed)


def load_spec(spec: Spec | Path | str, changes: tuple[str, ...]) -> Spec:
    """The spec of a run with its changes applied."""
    if not isinstance(spec, Spec):
        return Spec.load(spec, changes)
    return Spec.from_table(with_changes(spec.table(), changes)) if changes else spec


def client_spec(
    spec: Spec | Path | str, changes: tuple[str, ...], module: str = "", privacy: str = ""
) -> Spec:
    """The spec of a run as a client takes it; see `permissions` for what the submitter's changes may do.

    Args:
        spec: The app's own spec, or its file.
        changes: The submitter's changes.
        module: The module of the node's config; "" if it names none.
        privacy: The floor of the node's config; "" if it has none.
    """
    own = spec.table() if isinstance(spec, Spec) else read_toml(Path(spec))
    if isinstance(spec, Spec) and not changes and not module:
        run = spec
    else:
        run = Spec.from_table(permitted(own, with_changes(own, changes), module))
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
    if spec.secure is not None and spec.participation.weights != Participation.weights:
        settings["participation.weights"] = spec.participation.weights
    if spec.participation.known_start and spec.method.logs_changes:
        settings[KNOWN_START] = _start_of(problem)
    return Agreement.of(settings, problem.layout, spec.seed)


@functools.lru_cache(maxsize=4)  # for all messages that one process replies to
def _start_of(problem: Problem) -> str:
    return digest_of_arrays({"x": problem.x0})


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
