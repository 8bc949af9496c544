"""Letters as Flower's records, and the settings that a run's config gives."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedspan.api.spec import Spec, with_changes
from fedspan.core.errors import ProtocolError, SpecError
from fedspan.core.objective import Problem
from fedspan.remote.messages import RoundMessage

HEADER, ARRAYS = "header", "arrays"
KINDS = {"float32", "float64", "float16", "int16", "int32", "int64", "uint8"}  # bfloat16 travels as int16
Config = dict[str, Any]
SETTINGS: Config = {
    "set": "", "out": "", "run": "run", "resume": False, "timeout": 600.0, "wait": 120.0, "minimum": 1,
    "cast": "float32", "backup": True, "checkpoint-every": 1, "states": "",
}  # fmt: skip


def settings_of(config: Any) -> Config:
    """The run's settings: what `flwr run --run-config` says, else what is usual."""
    found = {name: config.get(name, usual) for name, usual in SETTINGS.items()}
    for name, usual in SETTINGS.items():
        value = found[name]
        if type(usual) is float and type(value) is int:
            found[name] = float(value)
        elif type(value) is not type(usual):
            raise SpecError(f"run config {name!r} must be {type(usual).__name__}, got {value!r}")
    return found


def spec_of(spec: Spec | Path | str, settings: Config) -> Spec:
    """The spec of a run, with the changes of `set` ("method.lr=0.1; rounds=5") applied."""
    changes = tuple(part.strip() for part in settings["set"].split(";") if part.strip())
    if isinstance(spec, Spec):
        return (Spec.from_table(with_changes(spec.table(), changes)) if changes else spec).settled()
    return Spec.load(Path(spec), changes).settled()


def record_of(round_message: RoundMessage) -> RecordDict:
    """A letter as Flower's records."""
    arrays = {}
    for name, tensor in round_message.arrays.items():
        plain = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
        arrays[name] = Array(plain.detach().contiguous().numpy())
    return RecordDict({HEADER: ConfigRecord(round_message.header()), ARRAYS: ArrayRecord(arrays)})


def letter_of(content: RecordDict, limit: int) -> RoundMessage:
    """A letter from Flower's records; sizes and types are looked at before any array is made."""
    header, records = content.get(HEADER), content.get(ARRAYS)
    if not isinstance(header, ConfigRecord) or not isinstance(records, ArrayRecord):
        raise ProtocolError("the message is not one of fedspan's")
    total = sum(len(array.data) for array in records.values())
    if total > limit:
        raise ProtocolError(f"the message has {total:,} bytes of arrays; at most {limit:,} are taken")
    arrays = {}
    for name, array in records.items():
        tensor = torch.from_numpy(numbers_of(name, array.data))
        short = header.get("cast") == "bfloat16" and tensor.dtype == torch.int16
        arrays[name] = tensor.view(torch.bfloat16) if short else tensor
    return RoundMessage.read(dict(header), arrays)


def numbers_of(name: str, data: bytes) -> np.ndarray[Any, Any]:
    """An array from NumPy's own format, which must be as long as its header says: nothing is made on its word alone."""
    stream = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(stream)
    except ValueError:
        raise ProtocolError(f"array {name!r:.40} is not in NumPy's format") from None
    if dtype.name not in KINDS or fortran:
        kinds = ", ".join(sorted(KINDS))
        raise ProtocolError(f"array {name!r:.40} is of type {dtype.name!r:.40}; one of {kinds} in C order is taken")
    if math.prod(shape) * dtype.itemsize != len(data) - stream.tell():
        raise ProtocolError(f"array {name!r:.40} says it is {shape!s:.60}, but holds {len(data)} bytes")
    return np.frombuffer(data, dtype, offset=stream.tell()).reshape(shape).copy()


def limit_of(problem: Problem) -> int:
    """No honest letter is longer: the model, two states of its size, a log of at most its size, and some headers."""
    return 8 * problem.layout.size * problem.x0.element_size() + (1 << 16)


def size_of(content: RecordDict) -> int:
    """Bytes of a message's records: arrays with Flower's own headers, and ours as text."""
    arrays, header = content.get(ARRAYS), content.get(HEADER)
    sized = arrays.count_bytes() if isinstance(arrays, ArrayRecord) else 0
    return sized + (len(json.dumps(dict(header))) if isinstance(header, ConfigRecord) else 0)
