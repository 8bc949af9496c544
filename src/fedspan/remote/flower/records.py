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
DTYPES = {"float32", "float64", "float16", "int16", "int32", "int64", "uint8"}  # bfloat16 is sent as int16


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The keys of `flwr run --run-config`, there with hyphens instead of underscores."""

    run_dir: str = ""  # directory on the server for history, checkpoint, model and copies of states; required
    set: str = ""  # changes of the spec, separated by ";"
    run_name: str = "run"  # name under which clients keep their states
    states_dir: str = ""  # directory on the clients for their states
    resume: bool = False  # continue the run in run_dir
    timeout: float = 600.0  # seconds that a round waits for replies
    wait: float = 120.0  # seconds to wait for all clients at the start
    min_replies: int = 1  # a round with fewer accepted replies changes nothing
    reply_dtype: str = "float32"  # "bfloat16" or "float16" halve the bytes of replies
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
            if type(value) is not kind:
                raise SpecError(f"run config {key!r} must be {kind.__name__}, got {value!r}")
            values[field.name] = value
        return RunConfig(**values)

    @property
    def changes(self) -> tuple[str, ...]:
        """The changes of `set`, such as ("method.lr=0.1", "rounds=5")."""
        return tuple(part.strip() for part in self.set.split(";") if part.strip())


def write_message(message: RoundMessage) -> RecordDict:
    """A message as Flower's records."""
    arrays = {}
    for name, tensor in message.arrays.items():
        plain = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
        arrays[name] = Array(plain.detach().contiguous().numpy())
    return RecordDict({HEADER: ConfigRecord(message.header()), ARRAYS: ArrayRecord(arrays)})


def read_message(content: RecordDict, max_bytes: int) -> RoundMessage:
    """A message from Flower's records; sizes and types are checked before any array is made."""
    header, records = content.get(HEADER), content.get(ARRAYS)
    if not isinstance(header, ConfigRecord) or not isinstance(records, ArrayRecord):
        raise ProtocolError("the message is not one of fedspan's")
    total = sum(len(array.data) for array in records.values())
    if total > max_bytes:
        raise ProtocolError(f"the message has {total:,} bytes of arrays; at most {max_bytes:,} are allowed")
    arrays = {}
    for name, array in records.items():
        tensor = torch.from_numpy(read_array(name, array.data))
        rounded = header.get("reply_dtype") == "bfloat16" and tensor.dtype == torch.int16
        arrays[name] = tensor.view(torch.bfloat16) if rounded else tensor
    return RoundMessage.read(dict(header), arrays)


def read_array(name: str, data: bytes) -> np.ndarray[Any, Any]:
    """An array in NumPy's format. Nothing is allocated before its length matches what its header claims."""
    stream = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(stream)
    except ValueError:
        raise ProtocolError(f"array {name!r:.40} is not in NumPy's format") from None
    if dtype.name not in DTYPES or fortran:
        allowed = ", ".join(sorted(DTYPES))
        raise ProtocolError(f"array {name!r:.40} is of type {dtype.name!r:.40}; allowed in C order are {allowed}")
    if math.prod(shape) * dtype.itemsize != len(data) - stream.tell():
        raise ProtocolError(f"array {name!r:.40} claims shape {shape!s:.60}, but holds {len(data)} bytes")
    return np.frombuffer(data, dtype, offset=stream.tell()).reshape(shape).copy()


def max_bytes(problem: Problem) -> int:
    """Above any valid message: the model, two states of its size, a log of at most its size, and headers."""
    return 8 * problem.layout.size * problem.x0.element_size() + (1 << 16)


def count_bytes(content: RecordDict) -> int:
    """Bytes of a message's records: arrays with Flower's headers, and fedspan's header as text."""
    arrays, header = content.get(ARRAYS), content.get(HEADER)
    size = arrays.count_bytes() if isinstance(arrays, ArrayRecord) else 0
    return size + (len(json.dumps(dict(header))) if isinstance(header, ConfigRecord) else 0)
