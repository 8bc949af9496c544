"""The axes of a method besides its space: drift, local optimizer, uplink, server and downlink.

`fedspan.methods.box` is the algorithm over them. A choice is a frozen dataclass of settings in one file. It keeps its
state as named parts of the server's and the clients' states: `init_server` and `init_client` return the first ones as
a dictionary, and what a later function returns takes their place. Two choices of a method cannot use the same name.
The base classes do what is trivial: no correction, vectors as they are, the mean of a round, x in full.

Vectors are (runs, clients, size). Inside the subspace of a round they have r values, and P is the `LinearMap` to it;
states have d values. `P.T.put(inside, state)` replaces the part of a state that lies in the subspace, and leaves the
rest. With P = I both are the same. Everything points along descent: x ← x − Pᵀ move.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from fedspan.core.bundle import Bundle, Ranges
from fedspan.core.compressor import Compressor
from fedspan.core.errors import positive
from fedspan.core.layout import Layout, Vector
from fedspan.core.objective import Direction, Plus
from fedspan.core.projector import LinearMap
from fedspan.core.round import Round

Parts = dict[str, Any]
"""Named parts of a state or a message, such as `{"c": …}`."""


class Drift:
    """What keeps local steps from drifting, and what clients send of them.

    The default does nothing: clients send what their steps came to, −z, and x moves by the mean of that.
    """

    in_gradients: ClassVar[bool] = False  # whether clients send a mean gradient instead of −z
    controls: ClassVar[tuple[str, ...]] = ()  # parts that server and clients have in common
    statistics: ClassVar[Mapping[str, Ranges]] = {}  # parts of a reply beside the payload
    follows_states: ClassVar[bool] = (
        False  # whether the server adds up replies to follow a sum over clients' states
    )

    def without_tests(self) -> Drift:
        """Return the choice without what it measures to decide."""
        return self

    def init_server(self, x0: Vector) -> Parts:
        """Return the server's parts before round 0."""
        return {}

    def init_client(self, x0: Vector) -> Parts:
        """Return a client's parts before its first round; they depend on shape and type of x0 only."""
        return {}

    def down(self, server: Bundle, P: LinearMap, rnd: Round) -> Parts:
        """Return what clients need of the server; a compressed downlink compresses its vectors."""
        return {}

    def begin(self, client: Bundle, down: Bundle, P: LinearMap, rnd: Round) -> Any:
        """Return what the other functions of a client's round need, before its local steps."""
        return None

    def plus(self, work: Any, x: Vector, P: LinearMap) -> Plus:
        """Return what is added to local gradients: a vector, or a function of the point; None for nothing."""
        return None

    def watch(self, work: Any, direction: Direction) -> Direction:
        """Return the direction of the local steps, possibly one that remembers its values."""
        return direction

    def reply(
        self,
        work: Any,
        came: Vector,
        watched: Direction,
        client: Bundle,
        P: LinearMap,
        steps: int | torch.Tensor,
    ) -> Parts:
        """Return the parts of a reply; `v` is sent by the uplink. `came` is −z, or the mean gradient; change it freely.

        `steps` is their number, or that of each client, (runs, clients, 1).
        """
        return {"v": came}

    def after(self, client: Bundle, v: Vector, P: LinearMap, rnd: Round) -> Parts:
        """Return a client's parts after the server has received `v` of it."""
        return {}

    def direction(self, server: Bundle, v: Vector, P: LinearMap, rnd: Round) -> Vector:
        """Return what a mean of `v`, or each `v`, means for x: a descent direction in the unit of `v`."""
        return v

    def server(self, server: Bundle, mean: Vector, up: Bundle, P: LinearMap, rnd: Round) -> Parts:
        """Return the server's parts after the replies of a round."""
        return {}

    def measures(self, server: Bundle) -> Mapping[str, Any]:
        """Return what a row of the history shows, one value per run."""
        return {}


class Optimizer(ABC):
    """Local steps along a direction, for a whole cohort: everything is elementwise.

    The memory of an optimizer is one vector of `size(n)` values for n trained ones, zero at the start.
    """

    plain: bool = False  # whether a step is y ← y − η direction(y): the mean direction follows from the end point
    decay: float = 0.0  # weight decay, in addition to that of the objective
    moments: str = "reset"  # the memory between a client's rounds: "reset" or "project"
    scaled: bool = False  # whether clients scale steps by D, from the server's state

    @abstractmethod
    def step(self, y: Vector, g: Vector, memory: Vector, lr: float, origin: Vector | None) -> None:
        """Take a step from y along g. It changes y and the memory in place; the weights that decay are origin + y."""

    def size(self, n: int) -> int:
        """Return the number of values in the memory for n trained ones."""
        return 0

    def carry(self, held: Vector, old: LinearMap, new: LinearMap) -> Vector:
        """Return a memory of steps inside one subspace as the memory to start with inside another."""
        return new @ (old.T @ held)

    def init_server(self, x0: Vector, layout: Layout) -> Parts:
        """Return the server's parts before round 0."""
        return {}

    def scales(self, source: Bundle, P: LinearMap) -> Vector | None:
        """Return D inside the subspace, from the server's state or a download; None for D = 1."""
        return None

    def down(self, server: Bundle) -> Parts:
        """Return what clients need of the server."""
        return {}

    def server(self, server: Bundle, w: Vector, P: LinearMap) -> Parts:
        """Return the server's parts after a round with the mean gradient w; only if `scaled`."""
        return {}

    def descend(
        self,
        start: Vector,
        direction: Any,
        lr: float,
        steps: int,
        origin: Vector | None = None,
        held: Vector | None = None,
        shift: Vector | None = None,
        average: bool = False,
        own: torch.Tensor | None = None,
    ) -> tuple[Vector, Vector | None, Any]:
        """Return end point, memory and, if asked for, the mean direction of some steps.

        Plain steps have no memory: it stays as it was at the start.

        Args:
            start: The point from which the steps are taken, which all clients of a cohort may share.
            direction: What a step follows; see `Direction`.
            lr: The step size.
            steps: The number of steps, or the largest one of `own`.
            origin: What `start` is relative to, for weight decay.
            held: The memory at the start; zeros by default.
            shift: What is added to the point after every step; it does not enter the memory.
            average: Whether the mean direction is needed. After plain steps the end point shows it.
            own: The number of steps of each client, (runs, clients, 1), where they differ.
        """
        if (
            self.plain
            and shift is None
            and not average
            and getattr(direction, "takes_steps", False)
        ):
            if own is None:
                return direction.descend(start, lr, steps), held, None
            y, end, done = start, start, 0
            for until in own.int().unique().tolist():
                y = direction.descend(y, lr, until - done)
                end = y if done == 0 else torch.where(own < until, end, y)
                done = until
            return end, held, None
        in_place = getattr(direction, "in_place", None)
        total: Any = 0
        least = steps if own is None else int(own.min())
        with contextlib.nullcontext(start) if in_place is None else in_place(start) as y:
            for number in range(steps):
                g = direction(y)
                if number == 0:  # `start` and `held` are the caller's
                    y = start.expand_as(g).clone() if in_place is None else y
                    size = *g.shape[:-1], self.size(g.shape[-1])
                    memory = g.new_zeros(size) if held is None else held.clone()
                # whose steps are not over
                on = None if own is None or number < least else own > number
                before = None if on is None else (y.clone(), memory.clone())
                if average:
                    total = total + (g if on is None else torch.where(on, g, 0.0))
                self.step(y, g, memory, lr, origin)
                if shift is not None:
                    y.add_(shift)
                if on is not None and before is not None:
                    y.copy_(torch.where(on, y, before[0]))
                    memory.copy_(torch.where(on, memory, before[1]))
                if number < steps - 1:
                    del g  # not to be held during the next gradient
            # nothing else needs the gradient's memory now
            return (
                y if in_place is None else g.copy_(y),
                memory,
                total / (steps if own is None else own),
            )


class Uplink:
    """How a client's vector travels to the server: as it is, or compressed if there is a compressor."""

    adopts: ClassVar[str] = "code"  # the choice that a compressor stands for
    in_gradients: ClassVar[bool] = False  # whether what is sent must be a mean gradient
    follows_states: ClassVar[bool] = (
        False  # whether the server adds up replies to follow a sum over clients' states
    )
    needs_no_controls: ClassVar[str] = ""  # why it does not go with controls
    private: tuple[str, ...] = ()  # client parts that follow from its data and not from its replies
    compressor: Compressor | None = None

    @property
    def plain_sum(self) -> bool:
        """Whether the server needs only the mean of what is sent."""
        return self.compressor is None and type(self).mean is Uplink.mean

    def check(self, n: int, drift: Drift) -> None:
        """Raise SpecError if the compressor cannot be used for n values with this drift correction."""

    def init_client(self, x0: Vector) -> Parts:
        """Return a client's parts before its first round."""
        return {}

    def init_server(self, x0: Vector) -> Parts:
        """Return the server's parts before round 0."""
        return {}

    def send(self, v: Vector, client: Bundle, P: LinearMap) -> tuple[Vector, Parts]:
        """Return what is sent for v, before it is compressed, and the client's parts before `after`."""
        return v, {}

    def after(self, client: Bundle, v: Vector, P: LinearMap) -> Parts:
        """Return the client's parts after v has arrived: what was sent, as the compressor left it."""
        return {}

    def mean(self, server: Bundle, v: Vector, P: LinearMap, rnd: Round) -> tuple[Vector, Parts]:
        """Return the mean of what arrived, and the server's parts."""
        return rnd.mean(v), {}


@dataclass(frozen=True)
class Server:
    """What the server makes of the mean direction of a round: η_g times it."""

    lr: float = field(default=1.0, kw_only=True)  # η_g: step size of the server
    needs_each_reply: ClassVar[bool] = False

    def __post_init__(self) -> None:
        positive("lr", self.lr)

    def init(self, x0: Vector) -> Parts:
        """Return the server's parts before round 0."""
        return {}

    def step(
        self, server: Bundle, direction: Vector, P: LinearMap, rnd: Round, each: Vector
    ) -> tuple[Vector, Parts]:
        """Return the move, which is subtracted from x, and the server's parts.

        Args:
            server: The server's state; its parts are attributes, such as `server.m`.
            direction: The mean direction of the round inside the subspace, (runs, 1, r).
            P: The subspace of the round; `P @ server.m` is what of a state lies in it.
            rnd: The round.
            each: The direction of each client, (runs, clients, r), if `needs_each_reply`; otherwise the mean.
        """
        return direction if self.lr == 1 else self.lr * direction, {}

    def sent(self, parts: Parts, move: Vector, sent: Vector, P: LinearMap) -> Parts:
        """Return the server's parts if a compressed downlink has sent something else than the move."""
        return parts


class Downlink:
    """How x travels to the clients: in full."""

    adopts: ClassVar[str] = "coded"  # the choice that a compressor stands for
    logs: ClassVar[bool] = False  # whether clients keep a copy of x and are sent what they lack
    control: Compressor | None = None  # compresses what `drift` sends

    def check(self, n: int) -> None:
        """Raise SpecError if the compressor cannot be used for n values."""

    def init(self, x0: Vector) -> Parts:
        """Return the server's parts before round 0."""
        return {}

    def down(self, server: Bundle, rnd: Round) -> Parts:
        """Return what clients are sent of x."""
        return {"x": server.x}

    def model(self, down: Bundle) -> Any:
        """Return x as the clients have it."""
        return down.x

    def send(self, server: Bundle, move: Vector, P: LinearMap, rnd: Round) -> tuple[Vector, Parts]:
        """Return the move that is sent, by which x changes at both ends, and the server's parts."""
        return move, {}

    def opened(self, entry: Any, P: LinearMap, rnd: Round) -> Any:
        """Return the move that a log entry stands for."""
        return entry

    def rest(self, server: Bundle, P: LinearMap, rnd: Round) -> Parts:
        """Return the server's parts after a round without replies."""
        return {}
