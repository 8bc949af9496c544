"""What a server asks its clients about their own data: before round 0, and to evaluate the model where the data are.

Before round 0 clients say how many examples they have and, of tables, what their columns are; then counts and sums,
until both ends have the same schema (`data.schema`). It is plain values that travel, as JSON, and no example.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fedspan.core import wire
from fedspan.core.errors import (
    DataError,
    ProtocolError,
    ResumableError,
    SpecError,
    client_name,
    one_line,
)
from fedspan.core.json_log import Form, fits
from fedspan.data.schema import Features, agree, scaled
from fedspan.data.table_data import union_of_classes
from fedspan.engine.simulator import BUFFERS
from fedspan.remote.messages import DESCRIBE, SUMS, Channel, DroppedError, RoundMessage
from fedspan.replies.chain import Event

# names of arrays: JSON as bytes, the model, what was agreed
TEXT, MODEL, AGREED = "text", "x", "agreed"
MOST = 1 << 23  # bytes of an answer
RETRY = 1.0  # seconds between two attempts to reach clients that have not answered
LATE = "no reply in time"
# the forms of answers
TABLES = {
    "facts": dict[str, dict[str, Any]], "classes": list[str], "others": list[str], "counts": dict[str, int],
}  # fmt: skip
ARRAY: Form = {"type": str, "rows": int}
COLUMN: Form = {
    **ARRAY,
    "gaps": int, "distinct": int, "whole": bool, "binary": bool, "same": str | None,
}  # fmt: skip
COLUMNS: dict[str, Form] = {
    **dict.fromkeys(("number", "date", "empty"), COLUMN),
    **{kind: {**COLUMN, "texts": dict[str, int]} for kind in ("boolean", "text")},
    "array": ARRAY,
}
EVALUATION = {
    "data": str, "examples": int, "metrics": dict[str, float | None], "summaries": dict[str, list[float]],
}  # fmt: skip


def to_text(value: Any) -> torch.Tensor:
    """Return plain values as an array of bytes."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def from_text(array: torch.Tensor | None) -> Any:
    """Return the plain values of an array that came over the network."""
    if array is None or array.dtype != torch.uint8:
        raise ProtocolError("the message has no text")
    try:
        return json.loads(array.numpy().tobytes())
    except (ValueError, RecursionError):
        raise ProtocolError("the text of the message is not JSON") from None


def answers(
    channel: Channel, messages: list[RoundMessage], good: Callable[[Any], bool]
) -> tuple[dict[int, Any], dict[int, Event]]:
    """Return the answers to a question by client, and what happened to the other clients.

    Args:
        channel: Carries the question.
        messages: One for each client that is asked.
        good: Whether an answer has its form; a client may send anything.
    """
    found = dict[int, Any]()
    missing = {one.client: Event("no reply", one.client, LATE) for one in messages}
    for index, reply in channel.deliver(messages):
        client = messages[index].client
        try:
            if isinstance(reply, DroppedError):
                raise reply
            if reply.status != "ok":
                raise ProtocolError(f"{reply.status}: {reply.reason}")
            value = from_text(reply.arrays.get(TEXT))
            if not good(value):
                raise ProtocolError(
                    f"the answer to {messages[index].status!r} does not have its form"
                )
            found.setdefault(client, value)
        except ProtocolError as error:
            missing[client] = Event("other", client, one_line(error))
    return found, {client: event for client, event in missing.items() if client not in found}


def gather(
    channel: Channel,
    names: Sequence[str],
    fingerprint: str,
    patience: float,
    asked: Features | None,
) -> dict[str, Any]:
    """Return what all clients have agreed on before round 0: their numbers of examples, a schema, the classes.

    Args:
        channel: Carries the questions.
        names: Of the clients, all of which have to answer.
        fingerprint: Of the run's settings.
        patience: Seconds to wait for clients that do not answer.
        asked: How columns become features, if the clients have tables.
    """

    def every(question: str, value: Any, good: Callable[[Any], bool]) -> list[Any]:
        found, began = dict[int, Any](), time.monotonic()
        text = {TEXT: to_text(value)}
        while True:
            asked = [
                RoundMessage(question, 0, client, 0, fingerprint, text, max_reply=MOST)
                for client in range(len(names))
                if client not in found
            ]
            more, missing = answers(channel, asked, good)
            found |= more
            if not missing:
                return [found[client] for client in range(len(names))]
            if time.monotonic() - began > patience:
                client, why = next(iter(missing.items()))
                raise ResumableError(
                    f"{client_name(client, names)} has not answered {question!r} within {patience:g} s ({why.text}); "
                    "every client has to, before round 0: start it, or resume the run when it is there"
                )
            time.sleep(RETRY)

    first = every(DESCRIBE, {}, lambda value: _is_description(value, asked is not None))
    agreed: dict[str, Any] = {
        name: [one[name] for one in first]
        for name in ("examples", "batches")
        if all(name in one for one in first)
    }
    if asked is None:
        return agreed
    schema = agree(
        {client_name(i, names): one["facts"] for i, one in enumerate(first)},
        asked,
        first[0]["others"],
    )
    for about in (False, True):
        told = every(
            SUMS, {"schema": schema.table(), "about": about}, lambda value: fits(value, list[float])
        )
        lengths = {len(one) for one in told}
        if len(lengths) > 1:
            raise DataError(f"clients have sums of different length, {sorted(lengths)}")
        schema = scaled(schema, np.sum(np.array(told, np.float64), 0), about)
    found = [one["classes"] for one in first]
    classes = union_of_classes(found) if any(found) else []
    counts = [sum(one["counts"].get(str(name), 0) for one in first) for name in classes]
    return agreed | {"schema": schema.table(), "classes": classes, "counts": counts}


def _is(value: Any, form: Form) -> bool:
    """Return whether a value is a table with these keys, each of its type."""
    there = isinstance(value, dict) and value.keys() == form.keys()
    return there and all(fits(value[key], hint) for key, hint in form.items())


def _is_description(value: Any, tables: bool) -> bool:
    form: dict[str, Any] = {"examples": int} | (TABLES if tables else {})
    if isinstance(value, dict) and "batches" in value:
        form["batches"] = float
    return (
        _is(value, form)
        and 0 < value.get("batches", 1) <= value["examples"]
        and all(map(_is_fact, value.get("facts", {}).values()))
        and min(value.get("counts", {}).values(), default=1) > 0
    )


def _is_fact(fact: dict[str, Any]) -> bool:
    form = COLUMNS.get(str(fact.get("type")))
    return form is not None and _is(fact, form)


def is_evaluation(value: Any) -> bool:
    """Return whether a client's answer is an evaluation of the model."""
    return (
        _is(value, EVALUATION)
        and value["data"] in ("train", "test", "validation")
        and all(value["summaries"].values())
    )


def own_evaluation(problem: Any, arrays: wire.Arrays, allowed: str | None) -> Any:
    """Return a client's evaluation of the model in a message, of the metrics that it allows."""
    x, buffers = arrays[MODEL].reshape(1, 1, -1), arrays.get(BUFFERS)
    if x.shape != problem.x0.shape:
        raise ProtocolError(f"the model has {x.shape[-1]} values, here {problem.x0.shape[-1]}")
    own = problem.evaluate_clients(x, None if buffers is None else buffers.reshape(1, 1, -1))
    ((row, summaries),) = own
    about = {name: row.pop(name) for name in ("data", "examples")}
    del row["client"]
    names = {*row, *summaries}
    if allowed is not None:
        names &= {name.strip() for name in allowed.split(",")}
        if names.isdisjoint(row):
            raise SpecError(f"this client's config allows the metrics {allowed!r} alone")
    return about | {
        "metrics": {k: v if math.isfinite(v) else None for k, v in row.items() if k in names},
        "summaries": {
            k: v for k, v in summaries.items() if k in names and all(map(math.isfinite, v))
        },
    }
