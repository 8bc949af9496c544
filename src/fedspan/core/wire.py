"""The one codec, a bundle of named parts ⇄ named flat arrays, and the ledger of the bytes that it packs.

Messages, client states, server states and checkpoints are all packed here: names and numbers, no pickle, no code. A
part is a tensor, a compressed vector (`Encoded`), a `ModelSync` called sync, or a `Log` called log. `sizes` is what the
ledger counts: the bytes of the arrays that `pack` makes for each client.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedspan.core.bundle import Bundle
from fedspan.core.encoded import Encoded
from fedspan.core.errors import CheckpointError, ProtocolError
from fedspan.core.layout import Arrays as Arrays
from fedspan.core.layout import Ints, all_finite
from fedspan.core.round import Round
from fedspan.core.sync import Log, ModelSync

Counts = Ints
PARTS = {field.name for field in dataclasses.fields(Encoded)}  # of a compressed vector


def pack(bundle: Bundle) -> Arrays:
    """Return the named arrays of a bundle; those of one part are joined to its name by dots."""
    out: Arrays = {}
    for name, part in vars(bundle).items():
        if isinstance(part, torch.Tensor):
            out[name] = part
        elif isinstance(part, Encoded | ModelSync | Log):
            inside = part.parts if isinstance(part, Encoded) else part.arrays()
            out.update({f"{name}.{inner}": array for inner, array in inside.items()})
        else:
            raise ProtocolError(f"part {name!r} of type {type(part).__name__} cannot be sent")
    return out


def unpack(arrays: Arrays) -> Bundle:
    """Return the bundle that `pack` made arrays of; raises ProtocolError if they are of none."""
    parts: dict[str, Any] = {}
    nested: dict[str, Arrays] = {}
    for name, array in arrays.items():
        outer, dot, inner = name.partition(".")
        if dot:
            nested.setdefault(outer, {})[inner] = array
        else:
            parts[name] = array
    for name, inside in nested.items():
        if name in parts or not name.isidentifier():
            raise ProtocolError(f"array {name!r} is there twice, or has an impossible name")
        if name == "sync":
            parts[name] = ModelSync.from_arrays(inside)
        elif name == "log":
            parts[name] = Log.from_arrays(inside)
        elif unknown := inside.keys() - PARTS:
            raise ProtocolError(f"a compressed vector has no part {min(unknown)!r}")
        else:
            parts[name] = Encoded(**inside)
    return Bundle(**parts)


def sizes(message: Bundle, buffers: torch.Tensor | None = None) -> Ints | int:
    """Payload bytes of a cohort's message, and of buffers with it, for each client: (runs, clients), or one for all."""
    found: Ints | int = 0 if buffers is None else buffers.shape[-1] * buffers.itemsize
    for part in vars(message).values():
        if isinstance(part, torch.Tensor):
            found = found + part.shape[-1] * part.itemsize
        else:
            found = found + (part.bytes if isinstance(part, Encoded) else part.sizes())
    return found


def pick(message: Bundle, client: int, full: bool = False) -> Bundle:
    """The message of one client, from that of the cohort of a single run; `full` sends it x in any case."""

    def own(of: list[torch.Tensor]) -> torch.Tensor:
        return of[0][:, client : client + 1] if of[0].shape[1] > 1 else of[0]

    parts = vars(message).items()
    return Bundle(
        **{
            name: part.pick(client, full) if isinstance(part, ModelSync) else _each([part], own)
            for name, part in parts
        }
    )


def of_clients(message: Bundle, places: Ints) -> Bundle:
    """The message of a cohort with the parts of some of its clients; what all have in common stays."""
    own: dict[str, Any] = {}
    for name, part in vars(message).items():
        if isinstance(part, ModelSync):
            own[name] = dataclasses.replace(part, last_round=part.last_round[:, places])
        elif isinstance(part, torch.Tensor) and part.shape[1] > 1:
            own[name] = part[:, places]
    return message.replace(**own) if own else message


def gather(messages: list[Bundle]) -> Bundle:
    """Return messages of single clients as the message of a cohort."""
    return Bundle(
        **{
            name: _each([getattr(one, name) for one in messages], lambda of: torch.cat(of, 1))
            for name in vars(messages[0])
        }
    )


def _each(parts: list[Any], function: Callable[[list[torch.Tensor]], torch.Tensor]) -> Any:
    """Return what a function makes of the same part of messages, or of each tensor of compressed vectors."""
    if isinstance(parts[0], Encoded):
        return Encoded(
            **{name: function([one.parts[name] for one in parts]) for name in parts[0].parts}
        )
    return function(parts)


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
        differs = any(a != b for a, b in axes if b or exact)
        if differs or (array.dtype, array.dim()) != (other.dtype, other.dim()):
            raise CheckpointError(
                f"{what} is damaged: {name!r} is {array.dtype} {tuple(array.shape)}, and must be "
                f"{other.dtype} {tuple(other.shape)}; start the run again"
            )


def check_weights(found: Arrays, like: Arrays, what: str) -> None:
    """Refuse weights that are not those of a model like this, or that are not finite where these are."""
    check_forms(found, like, what, exact=True)
    for name, array in found.items():
        known = array.is_floating_point() and array.numel() and all_finite(like[name])
        if known and not all_finite(array):
            raise CheckpointError(f"{what} is damaged: {name!r} is not finite; start the run again")


@dataclass(frozen=True, eq=False)
class Ledger:
    """Bytes sent so far, as packed; each array is (runs, N) and is added to in place."""

    up: Ints
    down: Ints

    @staticmethod
    def empty(runs: int, clients: int) -> Ledger:
        """A ledger before the first round."""
        return Ledger(*np.zeros((2, runs, clients), np.int64))

    def sent(self, rnd: Round, sizes: Ints | int) -> None:
        """Count the downloads of a round; `sizes` is (runs, S), or one number for all."""
        self.down.reshape(-1)[rnd.rows] += sizes if isinstance(sizes, int) else sizes.reshape(-1)

    def received(self, rnd: Round, sizes: Ints | int) -> None:
        """Count the replies of a round."""
        self.up.reshape(-1)[rnd.rows] += sizes if isinstance(sizes, int) else sizes.reshape(-1)

    def totals(self) -> tuple[Ints, Ints]:
        """(up, down) of each run so far."""
        return self.up.sum(1), self.down.sum(1)
