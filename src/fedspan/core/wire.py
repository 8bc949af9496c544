"""The one codec, a frozen dataclass of tensors ⇄ named flat arrays, and the ledger of the bytes that it packs.

Messages, client states, server states and checkpoints are all packed here: names and numbers, no pickle, no code. A
field is a tensor, a whole number, a `ModelSync` or `Log`, another such dataclass (`Encoded` for a compressed vector), a
tuple of these, or None. `sizes` is what the ledger counts: the bytes of the arrays that `pack` makes for each client.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from fedspan.core.errors import CheckpointError, ProtocolError
from fedspan.core.layout import all_finite
from fedspan.core.round import Round
from fedspan.core.sync import Log, ModelSync

Arrays = dict[str, torch.Tensor]
Counts = npt.NDArray[np.int64]
T = TypeVar("T")


def pack(value: Any, prefix: str = "") -> Arrays:
    """Named arrays of a dataclass; nested fields are joined by dots, None is left out."""
    out: Arrays = {}
    for field in dataclasses.fields(value):
        _pack_one(getattr(value, field.name), f"{prefix}{field.name}", out)
    return out


def unpack(kind: type[T], arrays: Arrays, prefix: str = "") -> T:
    """The inverse of `pack`; raises ProtocolError if an array is missing."""
    made = {
        name: _unpack_one(hint, arrays, prefix + name)
        for name, hint in _hints(typing.cast(Any, kind)).items()
    }
    return kind(**made)


def sizes(message: Any) -> Counts | int:
    """Payload bytes of a cohort's message for each client: (runs, clients), or one number where all are alike."""
    fixed = 0
    own: Counts | int = 0
    for name in _names(type(message)):
        value = getattr(message, name)
        if isinstance(value, torch.Tensor):
            fixed += value.shape[-1] * value.itemsize
        elif value is not None:
            own = own + (value.sizes() if isinstance(value, ModelSync) else sizes(value))
    return own + fixed


def pick(message: T, client: int, full: bool = False) -> T:
    """The message of one client, from that of the cohort of a single run; `full` sends it x in any case."""
    cut: dict[str, Any] = {}
    for name in _names(type(message)):
        value = getattr(message, name)
        if isinstance(value, ModelSync):
            value = value.pick(client, full)
        elif dataclasses.is_dataclass(value):
            value = pick(value, client, full)
        elif value is not None and value.shape[1] > 1:
            value = value[:, client : client + 1]
        cut[name] = value
    return type(message)(**cut)


def gather(messages: list[T]) -> T:
    """Messages of single clients as the message of a cohort."""
    joined: dict[str, Any] = {}
    for name in _names(type(messages[0])):
        values = [getattr(m, name) for m in messages]
        if dataclasses.is_dataclass(values[0]):
            joined[name] = gather(values)
        else:
            joined[name] = None if values[0] is None else torch.cat(values, 1)
    return type(messages[0])(**joined)


def check_forms(
    found: Arrays, like: Arrays, what: str = "the checkpoint", exact: bool = False
) -> None:
    """Refuses arrays whose names, types or shapes are not those of `like`; an axis of 0 there is any length."""
    for name in sorted(found.keys() ^ like.keys()):
        told = "it has no" if name in like else "a run like this has no"
        raise CheckpointError(f"{what} is damaged: {told} {name!r}; start the run again")
    for name, array in found.items():
        other = like[name]
        axes = zip(array.shape, other.shape, strict=False)
        if (
            array.dtype != other.dtype
            or array.dim() != other.dim()
            or any(a != b for a, b in axes if b or exact)
        ):
            here, there = (
                f"{str(one.dtype).removeprefix('torch.')} {tuple(one.shape)}"
                for one in (array, other)
            )
            raise CheckpointError(
                f"{what} is damaged: {name!r} is {here}, and must be {there}; start the run again"
            )


def check_weights(found: Arrays, like: Arrays, what: str) -> None:
    """Refuses weights that are not those of a model like this, or that are not finite where these are."""
    check_forms(found, like, what, exact=True)
    for name, array in found.items():
        if (
            array.is_floating_point()
            and array.numel()
            and all_finite(like[name])
            and not all_finite(array)
        ):
            raise CheckpointError(f"{what} is damaged: {name!r} is not finite; start the run again")


@dataclass(frozen=True, eq=False)
class Ledger:
    """Bytes sent so far, as packed; each array is (runs, N) and is added to in place."""

    up: Counts
    down: Counts

    @staticmethod
    def empty(runs: int, clients: int) -> Ledger:
        """A ledger before the first round."""
        return Ledger(*(np.zeros((runs, clients), np.int64) for _ in range(2)))

    def sent(self, rnd: Round, sizes: Counts | int) -> None:
        """Counts the downloads of a round; `sizes` is (runs, S), or one number for all."""
        self.down.reshape(-1)[rnd.rows] += sizes if isinstance(sizes, int) else sizes.reshape(-1)

    def received(self, rnd: Round, sizes: Counts | int) -> None:
        """Counts the replies of a round."""
        self.up.reshape(-1)[rnd.rows] += sizes if isinstance(sizes, int) else sizes.reshape(-1)

    def totals(self) -> tuple[Counts, Counts]:
        """(up, down) of each run so far."""
        return self.up.sum(1), self.down.sum(1)


_fields: dict[type, tuple[str, ...]] = {}


def _names(kind: type) -> tuple[str, ...]:
    if kind not in _fields:
        _fields[kind] = tuple(field.name for field in dataclasses.fields(kind))
    return _fields[kind]


@functools.cache  # evaluating annotations takes longer than unpacking a reply
def _hints(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {name: hints[name] for name in _names(kind)}


def _pack_one(value: Any, name: str, out: Arrays) -> None:
    if value is None:
        return
    if isinstance(value, torch.Tensor):
        out[name] = value
    elif isinstance(value, int):
        out[name] = torch.tensor([value])
    elif isinstance(value, tuple):
        out[f"{name}.count"] = torch.tensor([len(value)])
        for number, item in enumerate(value):
            _pack_one(item, f"{name}.{number}", out)
    elif isinstance(value, ModelSync | Log):
        out.update({f"{name}.{part}": array for part, array in value.arrays().items()})
    elif dataclasses.is_dataclass(value):
        out.update(pack(value, f"{name}."))
    else:
        raise ProtocolError(f"field {name!r} of type {type(value).__name__} cannot be sent")


def _unpack_one(hint: Any, arrays: Arrays, name: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        nested = any(key.startswith(f"{name}.") for key in arrays)
        for option in arguments:  # a tensor or a dataclass, whichever is there; None if neither is
            if (
                nested
                if dataclasses.is_dataclass(option) or option is ModelSync
                else name in arrays
            ):
                return _unpack_one(option, arrays, name)
        return None
    if origin is tuple:
        count = int(_array(arrays, f"{name}.count"))
        if count > len(arrays):
            raise ProtocolError(
                f"{name!r} would have {count:,} parts, but there are {len(arrays)} arrays"
            )
        return tuple(_unpack_one(arguments[0], arrays, f"{name}.{i}") for i in range(count))
    if hint is ModelSync or hint is Log:
        return hint.from_arrays(
            {k[len(name) + 1 :]: v for k, v in arrays.items() if k.startswith(f"{name}.")}
        )
    if dataclasses.is_dataclass(hint):
        return unpack(typing.cast(type, hint), arrays, f"{name}.")
    array = _array(arrays, name)
    if hint is int:
        return int(array)
    return array


def _array(arrays: Arrays, name: str) -> torch.Tensor:
    if name not in arrays:
        raise ProtocolError(
            f"array {name!r} is missing; both ends must run the same method and fedspan version"
        )
    return arrays[name]
