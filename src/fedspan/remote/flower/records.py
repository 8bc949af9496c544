"""Messages as Flower's records, and the run config of `flwr run`."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedspan.core.errors import ProtocolError, SpecError
from fedspan.core.objective import Problem
from fedspan.remote.messages import RoundMessage

HEADER, ARRAYS = "header", "arrays"
DTYPES = {"<f4", "<f8", "<i4", "<i8", "|u1"}  # little-endian
RAW, PART = "raw", "#"  # how a large array is sent: its bytes, in pieces named x#0, x#1, …
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
            if kind is float and type(value) is int:
                value = float(value)
            if field.name == "bind_clients" and type(value) is not bool and value != "auto":
                raise SpecError(f'run config {key!r} must be true, false or "auto", got {value!r}')
            if type(value) is not kind and field.name != "bind_clients":
                raise SpecError(f"run config {key!r} must be {kind.__name__}, got {value!r}")
            values[field.name] = value
        found = RunConfig(**values)
        for key, value in (("timeout", found.timeout), ("pause", found.pause)):
            if not (math.isfinite(value) and value > 0):
                raise SpecError(
                    f"run config {key!r} must be a positive number of seconds, got {value!r}"
                )
        if not (math.isfinite(found.wait) and found.wait >= 0):
            raise SpecError(
                f"run config 'wait' must be a number of seconds of at least 0, got {found.wait!r}"
            )
        for key, count in (
            ("min-replies", found.min_replies),
            ("checkpoint-every", found.checkpoint_every),
        ):
            if count < 1:
                raise SpecError(
                    f"run config {key!r} must be a whole number of at least 1, got {count!r}"
                )
        return found

    @property
    def changes(self) -> tuple[str, ...]:
        """The changes of `set`, such as ("method.lr=0.1", "rounds=5")."""
        return tuple(part.strip() for part in self.set.split(";") if part.strip())


def write_message(message: RoundMessage) -> RecordDict:
    """A message as Flower's records."""
    arrays = ArrayRecord()
    for name, tensor in message.arrays.items():
        for piece, array in _pieces(name, tensor.detach().contiguous().numpy()).items():
            arrays[piece] = array  # one by one: the constructor would copy it
    return RecordDict({HEADER: ConfigRecord(message.header()), ARRAYS: arrays})


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
    arrays = {}
    for name, pieces in _grouped(records).items():
        large = pieces[0] != name
        found = (
            read_pieces(name, pieces, records) if large else read_array(name, records[name].data)
        )
        arrays[name] = torch.from_numpy(found)
    return RoundMessage.read(dict(header), arrays)


def _pieces(name: str, array: np.ndarray[Any, Any]) -> dict[str, Array]:
    """An array as Flower's; a large one in pieces that are views of it, because Flower joins what one `Array` holds."""
    if array.nbytes <= PIECE:
        return {name: Array(array)}
    raw, step = array.reshape(-1).view(np.uint8), max(PIECE, array.nbytes // MAX_PIECES)
    pieces = {}
    for number, start in enumerate(range(0, raw.size, step)):
        pieces[f"{name}{PART}{number}"] = piece = Array(array.dtype.str, array.shape, RAW, b"")
        piece.data = raw[start : start + step]  # type: ignore[assignment]  # any buffer serves
    return pieces


def _grouped(records: ArrayRecord) -> dict[str, list[str]]:
    """Name of an array → names of its pieces, in order; its own name if it is in one piece."""
    groups: dict[str, list[str]] = {}
    for key in records:
        groups.setdefault(key.partition(PART)[0], []).append(key)
    return groups


def read_pieces(name: str, keys: list[str], records: ArrayRecord) -> np.ndarray[Any, Any]:
    """A large array from its pieces, each of which is freed once it is copied."""
    first = records[keys[0]]
    if keys != [f"{name}{PART}{number}" for number in range(len(keys))]:
        raise ProtocolError(f"the pieces of array {name!r:.40} are not complete")
    if first.dtype not in DTYPES:
        raise ProtocolError(
            f"array {name!r:.40} is of type {first.dtype!r:.40}; allowed are {', '.join(sorted(DTYPES))}"
        )
    dtype, shape, size = (
        np.dtype(first.dtype),
        tuple(first.shape),
        sum(len(records[key].data) for key in keys),
    )
    if len(shape) > 8 or not all(type(n) is int and 0 <= n <= size for n in shape):
        raise ProtocolError(
            f"array {name!r:.40} claims shape {shape!s:.60}, but holds {size} bytes"
        )
    if math.prod(shape) * dtype.itemsize != size:
        raise ProtocolError(
            f"array {name!r:.40} claims shape {shape!s:.60}, but holds {size} bytes"
        )
    raw, end = np.empty(size, np.uint8), 0
    for key in keys:
        piece = np.frombuffer(records[key].data, np.uint8)
        raw[end : end + piece.size] = piece
        end += piece.size
        del piece, records[key]
    return raw.view(dtype).reshape(shape)


def read_array(name: str, data: bytes) -> np.ndarray[Any, Any]:
    """An array in NumPy's format. Nothing is allocated before its length matches what its header claims."""
    stream = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(stream)
        read = (
            np.lib.format.read_array_header_1_0
            if version == (1, 0)
            else np.lib.format.read_array_header_2_0
        )
        shape, fortran, dtype = read(stream)
    except Exception:  # NumPy's parser raises many kinds
        raise ProtocolError(f"array {name!r:.40} is not in NumPy's format") from None
    if dtype.str not in DTYPES or (fortran and len(shape) > 1):
        allowed = ", ".join(sorted(DTYPES))
        raise ProtocolError(
            f"array {name!r:.40} is of type {dtype.str!r:.40}; allowed in C order are {allowed}"
        )
    if len(shape) > 8 or any(not 0 <= size <= len(data) for size in shape):
        raise ProtocolError(
            f"array {name!r:.40} claims shape {shape!s:.60}, but holds {len(data)} bytes"
        )
    if math.prod(shape) * dtype.itemsize != len(data) - stream.tell():
        raise ProtocolError(
            f"array {name!r:.40} claims shape {shape!s:.60}, but holds {len(data)} bytes"
        )
    return np.frombuffer(data, dtype, offset=stream.tell()).reshape(shape).copy()


def max_bytes(problem: Problem) -> int:
    """Above any valid message: the model, two states of its size, a log of at most its size, headers, and all keys."""
    return 8 * problem.layout.size * problem.x0.element_size() + (1 << 16) + 256 * problem.clients


def count_bytes(content: RecordDict) -> int:
    """Bytes of a message's records: arrays with Flower's headers, and fedspan's header as text."""
    arrays, header = content.get(ARRAYS), content.get(HEADER)
    size = arrays.count_bytes() if isinstance(arrays, ArrayRecord) else 0
    return size + (len(json.dumps(dict(header))) if isinstance(header, ConfigRecord) else 0)
