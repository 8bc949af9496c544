"""Messages as Flower's records, and the run config of `flwr run`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedspan.core import wire
from fedspan.core.errors import ProtocolError, SpecError, at_least, not_negative, positive
from fedspan.core.objective import Problem
from fedspan.remote.messages import RoundMessage
from fedspan.remote.sites import MOST

HEADER, ARRAYS = "header", "arrays"
DTYPES = {"<f4", "<f8", "<i4", "<i8", "|u1"}  # little-endian
RAW, PART = "raw", "#"  # how an array is sent: its bytes, in pieces named x#0, x#1, …
PIECE, MAX_PIECES = 1 << 24, 256  # bytes of a piece at least, and pieces of an array
MAX_ARRAYS = 4096  # in one message
MAX_HEADER = 64  # keys
MAX_TEXT = 16_000  # characters of a value in a header


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The keys of `flwr run --run-config`, there with hyphens instead of underscores."""

    run_dir: str = ""  # directory on the server for history, checkpoint, model, states; required
    set: str = ""  # changes of the spec, separated by ";"
    run_name: str = "run"  # name under which clients keep their states
    resume: bool = False  # continue the run in run_dir
    timeout: float = 600.0  # seconds that a round waits for replies
    wait: float = 120.0  # seconds to wait for all clients at the start
    min_replies: int = 1  # a round with fewer accepted replies changes nothing and is tried again
    pause: float = 3600.0  # seconds for which a round is tried again before the run stops
    bind_clients: bool | str = "auto"  # a number belongs to its first node; "auto": where nodes
    # are authenticated, without which a node has another id at every start
    backup: bool = True  # keep a copy of every client's state on the server's disk
    checkpoint_every: int = 1  # rounds

    @staticmethod
    def read(config: Mapping[str, Any]) -> RunConfig:
        """From Flower's run config; keys that are not fedspan's are ignored."""
        values: dict[str, Any] = {}
        for field in fields(RunConfig):
            key, kind = field.name.replace("_", "-"), type(field.default)
            value = config.get(key, field.default)
            if kind is float:
                (not_negative if key == "wait" else positive)(key, value)
                value = float(value)
            elif kind is int:
                at_least(key, value, 1)
            elif key == "bind-clients":
                if type(value) is not bool and value != "auto":
                    raise SpecError(
                        f'run config {key!r} must be true, false or "auto", got {value!r}'
                    )
            elif type(value) is not kind:
                raise SpecError(f"run config {key!r} must be {kind.__name__}, got {value!r}")
            values[field.name] = value
        return RunConfig(**values)

    @property
    def changes(self) -> tuple[str, ...]:
        """The changes of `set`, such as ("method.lr=0.1", "rounds=5")."""
        return tuple(part.strip() for part in self.set.split(";") if part.strip())


def write_message(message: RoundMessage, piece_bytes: int = PIECE) -> RecordDict:
    """A message as Flower's records; the pieces of a large array are views, because Flower joins what one holds."""
    records = ArrayRecord()
    for name, tensor in message.arrays.items():
        array = tensor.detach().contiguous().numpy()
        raw, step = array.reshape(-1).view(np.uint8), max(piece_bytes, array.nbytes // MAX_PIECES)
        for number, start in enumerate(range(0, max(raw.size, 1), step)):
            piece = Array(array.dtype.str, array.shape, RAW, b"")
            part: Any = raw[start : start + step]  # any buffer serves
            piece.data = part if raw.size > step else part.tobytes()
            records[f"{name}{PART}{number}"] = piece  # one by one: the constructor would copy it
    return RecordDict({HEADER: ConfigRecord(message.header()), ARRAYS: records})


def read_message(content: RecordDict, max_bytes: int) -> RoundMessage:
    """A message from Flower's records; sizes and types are checked before any array is made."""
    header, records = content.get(HEADER), content.get(ARRAYS)
    if not isinstance(header, ConfigRecord) or not isinstance(records, ArrayRecord):
        raise ProtocolError("the message is not one of fedspan's")
    if len(records) > MAX_ARRAYS or len(header) > MAX_HEADER:
        raise ProtocolError(
            f"the message has {len(records)} arrays and {len(header)} header keys; that is too many"
        )
    if any(
        isinstance(value, str | bytes | list) and len(value) > MAX_TEXT for value in header.values()
    ):
        raise ProtocolError(f"a value of the header is longer than {MAX_TEXT:,}")
    total = sum(len(array.data) for array in records.values())
    if total > max_bytes:
        raise ProtocolError(
            f"the message has {total:,} bytes of arrays; at most {max_bytes:,} are allowed"
        )
    return RoundMessage.read(dict(header), read_arrays(records))


def read_arrays(records: ArrayRecord) -> wire.Arrays:
    """The arrays of a message, the pieces of which are freed once they are copied.

    Nothing is allocated before the bytes that came match what an array claims to be.
    """
    pieces: dict[str, list[str]] = {}
    for key in records:
        pieces.setdefault(key.partition(PART)[0], []).append(key)
    arrays = {}
    for name, keys in pieces.items():
        if keys != [f"{name}{PART}{number}" for number in range(len(keys))]:
            raise ProtocolError(f"the pieces of array {name!r:.40} are not complete")
        first, size = records[keys[0]], sum(len(records[key].data) for key in keys)
        if first.stype != RAW or first.dtype not in DTYPES:
            raise ProtocolError(
                f"array {name!r:.40} is of type {first.dtype!r:.40}; allowed are {', '.join(sorted(DTYPES))}"
            )
        dtype, shape = np.dtype(first.dtype), tuple(first.shape)
        possible = len(shape) <= 8 and all(type(n) is int and 0 <= n < 1 << 31 for n in shape)
        if not possible or math.prod(shape) * dtype.itemsize != size:
            raise ProtocolError(
                f"array {name!r:.40} claims shape {shape!s:.60}, but holds {size} bytes"
            )
        raw, end = np.empty(size, np.uint8), 0
        for key in keys:
            piece = np.frombuffer(records[key].data, np.uint8)
            raw[end : end + piece.size] = piece
            end += piece.size
            del piece
            if len(keys) > 1:
                del records[key]
        arrays[name] = torch.from_numpy(raw.view(dtype).reshape(shape))
    return arrays


def max_bytes(problem: Problem) -> int:
    """Above any valid message: the model, two states of its size, a log of at most its size, headers, and all keys."""
    return (
        8 * problem.layout.size * problem.x0.element_size()
        + (1 << 16)
        + 256 * problem.clients
        + MOST
    )
