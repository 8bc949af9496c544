"""What a server asks its clients about their own data: before round 0, and to evaluate the model where the data are.

Before round 0 clients say how many examples they have and, of tables, what their columns are; then counts and sums,
until both ends have the same schema (`data.schema`). It is plain values that travel, as JSON, and no example. With
secure sums counts and sums are masked, in sessions as those of a round (`replies.secure`).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fedspan.core import wire
from fedspan.core.digest import digest, raw
from fedspan.core.errors import (
    ProtocolError,
    ResumableError,
    SpecError,
    client_name,
    one_line,
)
from fedspan.core.json_log import Form, fits
from fedspan.core.privacy import LEAST, Privacy
from fedspan.core.spec import Spec
from fedspan.data.schema import TALLIED, Features, Floats, agree, scaled, shared, summed
from fedspan.data.table_data import union_of_classes
from fedspan.engine.simulator import BUFFERS
from fedspan.remote.messages import BEFORE, DESCRIBE, SUMS, Channel, DroppedError, RoundMessage
from fedspan.replies.chain import Event
from fedspan.replies.fixed_point import LIMBS, from_limbs, in_limbs

# names of arrays: JSON as bytes, the model, what was agreed
TEXT, MODEL, AGREED = "text", "x", "agreed"
MOST = 1 << 23  # bytes of an answer
RETRY = 1.0  # seconds between two attempts to reach clients that have not answered
LATE = "no reply in time"
UNFIT = (  # no message: it may quote a cell
    "the table does not fit the question, or its numbers are too large or too small to add up; the log of this client "
    "says where"
)
# the forms of answers
TABLES = {"facts": dict[str, dict[str, Any]], "classes": list[str], "others": list[str]}
COLUMN: Form = {
    "type": str,
    "texts": list[str] | None,
    "range": list[float],
    "values": list[float],
    "row": int,
    "cell": str,
}
TYPES = ("number", "date", "time", "empty", "boolean", "text", "array", "ignored")
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
    channel: Channel, messages: list[RoundMessage], good: Callable[[Any], bool] | None
) -> tuple[dict[int, Any], dict[int, Event]]:
    """Return the answers to a question by client, and what happened to the other clients.

    Args:
        channel: Carries the question.
        messages: One for each client that is asked.
        good: Whether an answer has its form; a client may send anything. None: the answers are arrays, as they came.
    """
    found = dict[int, Any]()
    missing = {one.client: Event("no reply", one.client, LATE) for one in messages}
    for index, reply in channel.deliver(messages):
        client = messages[index].client
        try:
            if isinstance(reply, DroppedError):
                raise reply
            if reply.status == "refused":
                missing[client] = Event("refused", client, one_line(reply.reason))
                continue
            if reply.status != "ok":
                raise ProtocolError(f"{reply.status}: {reply.reason}")
            value = reply.arrays if good is None else from_text(reply.arrays.get(TEXT))
            if good is not None and not good(value):
                raise ProtocolError(
                    f"the answer to {messages[index].status!r} does not have its form"
                )
            found.setdefault(client, value)
        except ProtocolError as error:
            missing[client] = Event("other", client, one_line(error))
    return found, {client: event for client, event in missing.items() if client not in found}


def check_agreeing(spec: Spec) -> None:
    """Refuse to describe tables under differential privacy."""
    if spec.task.of_sites is not None and spec.dp is not None:
        raise SpecError(
            "`task.data.path` names a file for each client, and before round 0 clients would say what their columns "
            "are, and send sums of them, without noise; with `privacy` of `clip` use a module of your own (task "
            "'custom')"
        )


def gather(
    channel: Channel,
    names: Sequence[str],
    fingerprint: str,
    patience: float,
    asked: Features | None,
    secure: Privacy | None = None,
) -> dict[str, Any]:
    """Return what all clients have agreed on before round 0: their numbers of examples, a schema, the classes.

    Args:
        channel: Carries the questions.
        names: Of the clients, all of which have to answer.
        fingerprint: Of the run's settings.
        patience: Seconds to wait for clients that do not answer.
        asked: How columns become features, if the clients have tables.
        secure: Settings of secure sums, by which the server learns totals alone.
    """
    if secure is not None and len(names) < LEAST:
        raise SpecError(
            f"`privacy.secure` needs at least {LEAST} clients, got {len(names)}: a sum of fewer hides nobody; leave it "
            "out"
        )

    def until_all(question: str, attempt: Callable[[], dict[int, Event]]) -> None:
        began = time.monotonic()
        while missing := attempt():
            for client, event in missing.items():
                # a session of secure sums that was lost is begun again
                if event.kind == "refused" and (
                    question == DESCRIBE or not secure or event.text == UNFIT
                ):
                    raise ResumableError(
                        f"{client_name(client, names)} refuses {question!r}: {event.text}; correct it there, and start "
                        "the run again"
                    )
            if time.monotonic() - began > patience:
                client, why = next(iter(missing.items()))
                raise ResumableError(
                    f"{client_name(client, names)} has not answered {question!r} within {patience:g} s ({why.text}); "
                    "every client has to, before round 0: start it, or resume the run when it is there"
                )
            time.sleep(RETRY)

    def every(question: str, value: Any, good: Callable[[Any], bool]) -> list[Any]:
        found = dict[int, Any]()
        text = {TEXT: to_text(value)}

        def attempt() -> dict[int, Event]:
            asked = [
                RoundMessage(question, BEFORE, client, 0, fingerprint, text, max_reply=MOST)
                for client in range(len(names))
                if client not in found
            ]
            more, missing = answers(channel, asked, good)
            found.update(more)
            return missing

        until_all(question, attempt)
        return [found[client] for client in range(len(names))]

    used = set[bytes]()  # public keys

    def total(value: Any, length: int) -> Floats:
        if secure is None:
            return summed(
                every(SUMS, value, lambda one: fits(one, list[float]) and len(one) == length)
            )
        from fedspan.replies.secure.server import SecureSum  # needs a library

        question, late, found = to_text(value), dict[int, Event](), list[Floats]()

        def ask(
            phase: str, messages: dict[int, wire.Arrays], _: wire.Arrays
        ) -> dict[int, wire.Arrays]:
            most = MOST + 8 * LIMBS * length
            asked = [
                RoundMessage(
                    phase, BEFORE, client, 0, fingerprint, arrays | {TEXT: question}, max_reply=most
                )
                for client, arrays in messages.items()
            ]
            came, missing = answers(channel, asked, None)
            late.update(missing)
            return came

        def attempt() -> dict[int, Event]:
            late.clear()
            clients, about = list(range(len(names))), f"{BEFORE} {digest(raw(question), size=32)}"
            one = SecureSum(clients, LIMBS * length, in_limbs(secure), ask, used, about=about)
            one.threshold = len(names)
            try:
                found.append(from_limbs(one.run()[1]))
            except ProtocolError:
                wrong = {client: Event("refused", client, text) for client, text in one.events}
                if not late | wrong:
                    raise
                return late | wrong
            return {}

        until_all(SUMS, attempt)
        return found[0]

    first = every(DESCRIBE, {}, lambda value: _is_description(value, asked is not None))
    agreed: dict[str, Any] = {
        name: [one[name] for one in first]
        for name in ("examples", "batches")
        if all(name in one for one in first)
    }
    if asked is None:
        return agreed
    found = [one["classes"] for one in first]
    called = [client_name(client, names) for client in range(len(names))]
    classes = union_of_classes(dict(zip(called, found, strict=True))) if any(found) else []
    told = {who: one["facts"] for who, one in zip(called, first, strict=True)}
    columns = shared(told, asked)
    tallies = len(columns) * len(TALLIED)
    question = {"columns": columns, "classes": [*map(str, classes)]}
    counts = total(question, tallies + len(classes))
    schema = agree(told, counts[:tallies], asked, first[0]["others"])
    for about in (False, True):
        length = 2 * sum(column.numbers for column in schema.columns)
        schema = scaled(schema, total({"schema": schema.table(), "about": about}, length), about)
    of_classes = counts[tallies:].astype(int).tolist()
    return agreed | {"schema": schema.table(), "classes": classes, "counts": of_classes}


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
        and all(
            _is(one, COLUMN) and one["type"] in TYPES for one in value.get("facts", {}).values()
        )
    )


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
