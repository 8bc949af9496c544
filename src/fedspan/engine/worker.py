"""A client on its own: packed arrays and its own copy of the model in, new state and packed reply out."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fedspan.core import wire
from fedspan.core.errors import ProtocolError
from fedspan.core.layout import Vector
from fedspan.core.method import LogsChanges, Method, Round
from fedspan.core.objective import Problem
from fedspan.core.sync import SyncedDown
from fedspan.engine.loop import local_work


@dataclass(frozen=True, eq=False)
class Replica:
    """All that one client keeps between rounds: the method's state and its dated copy of x."""

    state: Any
    x: Vector | None = None
    last_round: int = -1


def without_zeros(state: Any) -> Any:
    """A state whose vectors of zeros take no memory."""
    zeros = {f.name: value for f in dataclasses.fields(state) if not (value := getattr(state, f.name)).any()}
    return replace(state, **{name: value.new_zeros(()).expand(value.shape) for name, value in zeros.items()})


BUFFERS = "buffers"  # the name under which they are packed, next to a message's own arrays


def answer(
    method: Method[Any, Any, Any, Any], problem: Problem, replica: Replica, down: wire.Arrays, rnd: Round
) -> tuple[Replica, wire.Arrays]:
    """One client's round from packed arrays to packed arrays; `rnd` is the round of this client alone."""
    message = opened(method, replica, down, rnd)
    x = message.sync.model if isinstance(message, SyncedDown) else None
    rnd = replace(rnd, last_round=np.array([[replica.last_round]]))
    with torch.inference_mode():
        state, up, buffers = local_work(method, problem, replica.state, message, down.get(BUFFERS), rnd)
    beside = {} if buffers is None else {BUFFERS: buffers}
    return Replica(state, x, rnd.t), wire.pack(up) | beside


def opened(method: Method[Any, Any, Any, Any], replica: Replica, down: wire.Arrays, rnd: Round) -> Any:
    """A download from its arrays, with x rebuilt from the client's copy if the server sent changes of it."""
    message: Any = wire.unpack(method.types()[2], down)

    def apply(copy: Vector, entry: Any, t: int) -> Vector:
        if not isinstance(method, LogsChanges):
            raise ProtocolError(
                f"the server sent changes of the model, and {type(method).__name__} keeps no log of them"
            )
        return method.apply_entry(copy, entry, replace(rnd, t=t))

    return message.opened(replica.x, replica.last_round, apply) if isinstance(message, SyncedDown) else message
