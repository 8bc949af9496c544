"""What clients do in a round: the work itself, and a client on its own, from packed arrays to a packed reply."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fedspan.core import wire
from fedspan.core.errors import ProtocolError
from fedspan.core.layout import Vector
from fedspan.core.method import Method
from fedspan.core.objective import Problem
from fedspan.core.round import Round
from fedspan.core.sync import opened as rebuilt
from fedspan.replies.clip import private_work


@dataclass(frozen=True, eq=False)
class Replica:
    """All that one client keeps between rounds: the method's state and its dated copy of x."""

    state: Any
    x: Vector | None = None
    last_round: int = -1


def without_zeros(state: Any) -> Any:
    """A state whose vectors of zeros take no memory."""
    zeros = {name: part for name, part in vars(state).items() if _is_zero(part)}
    return state.replace(
        **{name: part.new_zeros(()).expand(part.shape) for name, part in zeros.items()}
    )


def _is_zero(v: Vector) -> bool:
    """Whether all numbers are zero; without a vector of answers."""
    return not v.numel() or all(bool(end == 0) for end in torch.aminmax(v))


BUFFERS = "buffers"  # the name under which they are packed, next to a message's own arrays


def answer(
    method: Method,
    problem: Problem,
    replica: Replica,
    down: wire.Arrays,
    rnd: Round,
) -> tuple[Replica, wire.Arrays]:
    """One client's round from packed arrays to packed arrays; `rnd` is the round of this client alone."""
    message = opened(method, replica, down, rnd)
    sync = message.get("sync")
    x = None if sync is None else sync.model
    rnd = replace(rnd, last_round=np.array([[replica.last_round]]))
    with torch.inference_mode():
        state, up, buffers = local_work(
            method, problem, replica.state, message, down.get(BUFFERS), rnd
        )
    beside = {} if buffers is None else {BUFFERS: buffers}
    return Replica(state, x, rnd.t), wire.pack(up) | beside


def local_work(
    method: Method,
    problem: Problem,
    state: Any,
    down: Any,
    buffers: Vector | None,
    rnd: Round,
) -> tuple[Any, Any, Vector | None]:
    """What the clients of a round do, however many: (new states, replies, buffers). The same for every transport."""
    f = problem.cohort(rnd)
    if rnd.privacy is not None:
        return private_work(method, f, state, down, buffers, rnd)
    if buffers is None:
        return *method.client_step(state, down, f, rnd), None
    f.begin(buffers)
    state, up = method.client_step(state, down, f, rnd)
    return state, up, f.buffers()


def opened(method: Method, replica: Replica, down: wire.Arrays, rnd: Round) -> Any:
    """A download from its arrays, with x rebuilt from the client's copy if the server sent changes of it."""
    message = wire.unpack({name: array for name, array in down.items() if name != BUFFERS})
    sync = message.get("sync")
    if sync is not None:
        missed, since = len(sync.log.entries), max(replica.last_round, 0)
        lacks = method.logs_changes and sync.x is None and missed < rnd.t - since
        if lacks or missed > rnd.t - since:
            raise ProtocolError(
                f"the server sent {missed:,} changes of the model, but this client's copy is of round {since} and this "
                f"is round {rnd.t}"
            )

    def apply(copy: Vector, entry: Any, t: int) -> Vector:
        if not method.logs_changes:
            raise ProtocolError(
                f"the server sent changes of the model, and {type(method).__name__} keeps no log of them"
            )
        own = (
            copy is not replica.x
        )  # made here for the change before, so that this one may be added in place
        return method.apply_entry(copy, entry, replace(rnd, t=t, overwrite=own))

    return rebuilt(message, replica.x, replica.last_round, apply)
