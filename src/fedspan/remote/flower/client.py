"""The client's end: which client a node speaks for, and its answer to a letter."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedspan.api.spec import Spec
from fedspan.core.errors import FedspanError, SpecError
from fedspan.core.layout import DTYPES
from fedspan.remote.client import Client, Store
from fedspan.remote.flower.records import Config, letter_of, limit_of, record_of, settings_of, spec_of
from fedspan.remote.messages import REASON, RoundMessage

WHO, NOBODY = "who", -1


def introduce(context: Context) -> RecordDict:
    """Which client this is, or why it cannot say."""
    try:
        return RecordDict({WHO: ConfigRecord({"client": number_of(context), "reason": ""})})
    except FedspanError as error:
        return RecordDict({WHO: ConfigRecord({"client": NOBODY, "reason": str(error)[:REASON]})})


def reply_to(message: Message, context: Context, spec: Spec | Path | str) -> RecordDict:
    """The answer to a letter; whatever is wrong on this side becomes a refusal that says so."""
    try:
        settings = settings_of(context.run_config)
        resolved, client = spec_of(spec, settings), number_of(context)
        name = str(context.node_config.get("client-id", f"client-{client}"))
        method, problem = _ready(json.dumps(resolved.table(), sort_keys=True), client)
        round_message = letter_of(message.content, limit_of(problem))
        store = Store.of(states_folder(context, settings), settings["run"], name)
        reply = Client(method, problem, store, client, resolved.seed).answer(round_message)
    except FedspanError as error:
        reply = RoundMessage("refused", NOBODY, NOBODY, NOBODY, "", reason=str(error)[:REASON])
    return record_of(reply)


@functools.lru_cache(maxsize=4)
def _ready(table: str, client: int) -> tuple[Any, Any]:
    """Method and problem of a client; kept where one process answers several letters."""
    spec = Spec.from_table(json.loads(table))
    with torch.inference_mode(False):
        problem = spec.task.client_problem(client, (spec.seed,), DTYPES[spec.dtype])
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
