"""What a server asks its clients about their own data: before round 0, and to evaluate the model where the data are.

Before round 0 clients say how many examples they have and, of tables, what their columns are; then counts and sums,
until both ends have the same schema (`data.schema`). It is plain values that travel, as JSON, and no example.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fedspan.core import wire
from fedspan.core.errors import DataError, ProtocolError, SpecError, client_name, one_line
from fedspan.core.layout import Vector
from fedspan.data.schema import Features, agree, scaled
from fedspan.data.table_data import union_of_classes
from fedspan.engine.simulator import BUFFERS
from fedspan.remote.messages import (
    DESCRIBE,
    EVALUATE,
    SUMS,
    Channel,
    DroppedError,
    RoundMessage,
    StalledError,
)
from fedspan.replies.chain import Event

TEXT, MODEL, AGREED = (
    "text",
    "x",
    "agreed",
)  # names of arrays: JSON as bytes, the model, what was agreed
MOST = 1 << 23  # bytes of an answer
RETRY = 1.0  # seconds between two attempts to reach clients that have not answered
EVALUATION = {"data", "examples", "metrics", "summaries"}


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


def gather(
    channel: Channel,
    names: Sequence[str],
    *,
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
    clients = len(names)

    def every(question: str, value: Any) -> list[Any]:
        found: dict[int, Any] = {}
        began, why = time.monotonic(), dict[int, str]()
        while len(found) < clients:
            messages = [
                RoundMessage(question, 0, i, 0, fingerprint, {TEXT: to_text(value)}, max_reply=MOST)
                for i in range(clients)
                if i not in found
            ]
            for index, reply in channel.deliver(messages):
                client = messages[index].client
                try:
                    found[client] = _checked(question, _answer(reply), asked is not None)
                except ProtocolError as error:
                    why[client] = one_line(error)
            missing = [i for i in range(clients) if i not in found]
            if missing and time.monotonic() - began > patience:
                who, told = client_name(missing[0], names), why.get(missing[0], "no reply")
                raise StalledError(
                    f"{who} has not answered {question!r} within {patience:g} s ({told}); every client has to, before "
                    "round 0: start it, or resume the run when it is there"
                )
            if missing:
                time.sleep(RETRY)
        return [found[i] for i in range(clients)]

    first = every(DESCRIBE, {})
    agreed: dict[str, Any] = {"examples": [one["examples"] for one in first]}
    if asked is None:
        if all("batches" in one for one in first):
            agreed["batches"] = [one["batches"] for one in first]
        return agreed
    schema = agree(
        {client_name(i, names): one["facts"] for i, one in enumerate(first)},
        asked,
        first[0]["others"],
    )
    for about in (False, True):
        told = every(SUMS, {"schema": schema.table(), "about": about})
        lengths = {len(one) for one in told}
        if len(lengths) > 1:
            raise DataError(f"clients have sums of different length, {sorted(lengths)}")
        schema = scaled(schema, np.sum(np.array(told, np.float64), 0), about)
    found = [one["classes"] for one in first]
    classes = union_of_classes(found) if any(found) else []
    counts = [sum(one["counts"].get(str(name), 0) for one in first) for name in classes]
    return agreed | {"schema": schema.table(), "classes": classes, "counts": counts}


def _answer(reply: RoundMessage | DroppedError) -> Any:
    if isinstance(reply, DroppedError):
        raise reply
    if reply.status != "ok":
        raise DroppedError(f"{reply.status}: {reply.reason}", "refused")
    return from_text(reply.arrays.get(TEXT))


def _checked(question: str, value: Any, tables: bool) -> Any:
    """Return an answer that has the form of one; a client may send anything."""
    if question == SUMS:
        good = isinstance(value, list) and all(_is_number(one) for one in value)
    else:
        good = isinstance(value, dict) and type(value.get("examples")) is int
        good = good and 0 < value["examples"] < 1 << 53
        if good and "batches" in value:
            good = type(value["batches"]) is float and 0 < value["batches"] <= value["examples"]
        if good and tables:
            facts, classes, others = (value.get(key) for key in ("facts", "classes", "others"))
            good = isinstance(facts, dict) and all(map(_is_fact, facts.values()))
            counts = value.get("counts")
            good = good and isinstance(counts, dict)
            good = good and all(type(n) is int and 0 < n < 1 << 53 for n in counts.values())
            for names in (classes, others):
                good = good and isinstance(names, list)
                good = good and all(isinstance(one, str) for one in names)
    if not good:
        raise ProtocolError(f"the answer to {question!r} does not have its form")
    return value


def _is_fact(fact: Any) -> bool:
    counts = {"rows": int, "gaps": int, "distinct": int, "type": str, "whole": bool, "binary": bool}
    return (
        isinstance(fact, dict)
        and fact.get("type") in ("array", "number", "boolean", "text", "date", "empty")
        and all(type(fact.get(key)) is kind for key, kind in counts.items() if key in fact)
        and type(fact.get("rows")) is int
        and (fact["type"] == "array" or counts.keys() <= fact.keys())
        and isinstance(fact.get("same"), str | None)
        and isinstance(fact.get("texts", {}), dict)
        and all(type(count) is int for count in fact.get("texts", {}).values())
    )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


# --- Evaluation ---


def evaluate(
    channel: Channel,
    first: Sequence[wire.Arrays],
    t: int,
    fingerprint: str,
    x: Vector,
    buffers: Vector | None,
    events: list[Event],
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each client's own evaluation of the model; what goes wrong at a client becomes an event.

    `first` has what each client may not have yet of what was agreed on before round 0.
    """
    arrays: wire.Arrays = {MODEL: x.reshape(-1)}
    if buffers is not None:
        arrays[BUFFERS] = buffers.reshape(-1)
    messages = [
        RoundMessage(EVALUATE, t, i, 0, fingerprint, arrays | own, max_reply=MOST)
        for i, own in enumerate(first)
    ]
    done = set[int]()
    for index, reply in channel.deliver(messages):
        client = messages[index].client
        try:
            value = _answer(reply)
            if client in done or not _is_evaluation(value):
                raise ProtocolError("the evaluation does not have its form")
            done.add(client)
            yield client, value
        except ProtocolError as error:
            done.add(client)
            events.append(Event("other", client, f"not evaluated: {one_line(error)}"))
    late = "not evaluated: no reply in time"
    events += [
        Event("no reply", client, late) for client in range(len(first)) if client not in done
    ]


def _is_evaluation(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() != EVALUATION:
        return False
    metrics, summaries = value["metrics"], value["summaries"]
    return (
        value["data"] in ("train", "test", "validation")
        and type(value["examples"]) is int
        and isinstance(metrics, Mapping)
        and all(one is None or _is_number(one) for one in metrics.values())
        and isinstance(summaries, Mapping)
        and all(
            isinstance(one, list) and one and all(map(_is_number, one))
            for one in summaries.values()
        )
    )


def own_evaluation(problem: Any, arrays: wire.Arrays, allowed: str | None) -> Any:
    """Return a client's evaluation of the model in a message, of the metrics that it allows."""
    x = arrays[MODEL].reshape(1, 1, -1)
    if x.shape != problem.x0.shape:
        raise ProtocolError(f"the model has {x.shape[-1]} values, here {problem.x0.shape[-1]}")
    buffers = arrays.get(BUFFERS)
    buffers = None if buffers is None else buffers.reshape(1, 1, -1)
    ((row, summaries),) = problem.evaluate_clients(x, buffers)
    metrics = {k: v for k, v in row.items() if k not in ("client", "data", "examples")}
    if allowed is not None:
        names = {name.strip() for name in allowed.split(",")}
        metrics = {name: value for name, value in metrics.items() if name in names}
        summaries = {name: value for name, value in summaries.items() if name in names}
        if not metrics:
            raise SpecError(f"this client's config allows the metrics {allowed!r} alone")
    finite = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
    return {
        "data": row["data"],
        "examples": row["examples"],
        "metrics": finite,
        "summaries": {k: v for k, v in summaries.items() if all(map(math.isfinite, v))},
    }
