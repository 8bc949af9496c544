"""The axes of a method besides its space and its local optimizer: drift, uplink, server and downlink.

`fedspan.methods.box` is the algorithm over them. A choice is a frozen dataclass of settings in one file. It keeps its
state as named parts of the server's and the clients' states: `init_server` and `init_client` return the first ones as
a dictionary, and what a later function returns takes their place. Two choices of a method cannot use the same name.

Vectors are (runs, clients, size). Inside the subspace of a round they have r values, and P is the `LinearMap` to it;
states have d values. `P.T.put(inside, state)` replaces the part of a state that lies in the subspace, and leaves the
rest. With P = I both are the same. Everything points along descent: x ← x − Pᵀ move.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from fedspan.core.bundle import Bundle
from fedspan.core.compressor import Compressor
from fedspan.core.encoded import Encoded
from fedspan.core.layout import Vector
from fedspan.core.linear_map import LinearMap
from fedspan.core.objective import Direction, Plus
from fedspan.core.reply import Ranges
from fedspan.core.round import Round

Parts = dict[str, Any]


class Drift(ABC):  # noqa: B024 (every function has a default)
    """What keeps local steps from drifting, and what clients send of them.

    The default does nothing: clients send what their steps came to, −z, and x moves by the mean of that.
    """

    in_gradients: ClassVar[bool] = False  # whether clients send a mean gradient instead of −z
    controls: ClassVar[tuple[str, ...]] = ()  # parts that server and clients have in common
    statistics: ClassVar[Mapping[str, Ranges]] = {}  # parts of a reply beside the payload

    @property
    def follows_states(self) -> bool:
        """Whether the server adds up replies to follow a sum over the clients' states, such as c = mean c_i."""
        return False

    def without_tests(self) -> Drift:
        """Return the choice without what it measures to decide."""
        return self

    def init_server(self, x0: Vector) -> Parts:
        """Return the server's parts before round 0."""
        return {}

    def init_client(self, x0: Vector) -> Parts:
        """Return a client's parts before its first round; they depend on shape and type of x0 only."""
        return {}

    def down(self, server: Bundle, P: LinearMap, code: Compressor | None, rnd: Round) -> Parts:
        """Return what clients need of the server; `code` compresses vectors if the downlink is compressed."""
        return {}

    def begin(
        self, client: Bundle, down: Bundle, P: LinearMap, code: Compressor | None, rnd: Round
    ) -> Any:
        """Return what the other functions of a client's round need, before its local steps."""
        return None

    def plus(self, work: Any, x: Vector, P: LinearMap) -> Plus:
        """Return what is added to local gradients: a vector, or a function of the point; None for nothing."""
        return None

    def watch(self, work: Any, direction: Direction) -> Direction:
        """Return the direction of the local steps, possibly one that remembers its values."""
        return direction

    def reply(
        self, work: Any, came: Vector, watched: Direction, client: Bundle, P: LinearMap, steps: int
    ) -> Parts:
        """Return the parts of a reply; `v` is sent by the uplink. `came` is −z, or the mean gradient."""
        return {"v": came}

    def after(self, client: Bundle, v: Vector, P: LinearMap, rnd: Round) -> Parts:
        """Return a client's parts after the server has received `v` of it."""
        return {}

    def direction(self, server: Bundle, v: Vector, P: LinearMap) -> Vector:
        """Return what a mean of `v`, or each `v`, means for x: a descent direction in the unit of `v`."""
        return v

    def server(self, server: Bundle, mean: Vector, up: Bundle, P: LinearMap, rnd: Round) -> Parts:
        """Return the server's parts after the replies of a round."""
        return {}

    def measures(self, server: Bundle) -> Mapping[str, Any]:
        """Return what a row of the history shows, one value per run."""
        return {}


class Uplink(ABC):
    """How a client's vector travels to the server."""

    adopts: ClassVar[str] = "code"  # the choice that a compressor stands for
    plain_sum: ClassVar[bool] = False  # whether the server needs only the mean of what is sent
    in_gradients: ClassVar[bool] = False  # whether what is sent must be a mean gradient
    needs_no_controls: ClassVar[str] = ""  # why it does not go with controls
    private: tuple[str, ...] = ()  # client parts that follow from its data and not from its replies
    compressor: Compressor | None

    @property
    def follows_states(self) -> bool:
        """Whether the server adds up replies to follow a sum over the clients' states."""
        return False

    def check(self, n: int, drift: Drift) -> None:  # noqa: B027
        """Raise SpecError if the compressor cannot be used for n values with this drift correction."""

    def init_client(self, x0: Vector) -> Parts:
        """Return a client's parts before its first round."""
        return {}

    def init_server(self, x0: Vector) -> Parts:
        """Return the server's parts before round 0."""
        return {}

    @abstractmethod
    def send(
        self, v: Vector, client: Bundle, P: LinearMap, rnd: Round
    ) -> tuple[Vector | Encoded, Parts]:
        """Return what is sent of v, and the client's parts before `after`."""

    @abstractmethod
    def receive(self, sent: Any, P: LinearMap, rnd: Round) -> Vector:
        """Return what arrives, one vector per client."""

    def after(self, client: Bundle, v: Vector, P: LinearMap) -> Parts:
        """Return the client's parts after v has arrived."""
        return {}

    def mean(self, server: Bundle, v: Vector, P: LinearMap, rnd: Round) -> tuple[Vector, Parts]:
        """Return the mean of what arrived, and the server's parts."""
        return rnd.mean(v), {}


class Server(ABC):
    """What the server makes of the mean direction of a round."""

    needs_each_reply: ClassVar[bool] = False
    lr: float  # η_g

    def init(self, x0: Vector) -> Parts:
        """Return the server's parts before round 0."""
        return {}

    @abstractmethod
    def step(
        self,
        server: Bundle,
        direction: Vector,
        P: LinearMap,
        rnd: Round,
        each: Callable[[], Vector],
    ) -> tuple[Vector, Parts]:
        """Return the move, which is subtracted from x, and the server's parts.

        Args:
            server: The server's state; its parts are attributes, such as `server.m`.
            direction: The mean direction of the round inside the subspace, (runs, 1, r).
            P: The subspace of the round; `P @ server.m` is what of a state lies in it.
            rnd: The round.
            each: Returns the direction of each client, (runs, clients, r); only if `needs_each_reply`.
        """

    def sent(self, parts: Parts, move: Vector, sent: Vector, P: LinearMap) -> Parts:
        """Return the server's parts if a compressed downlink has sent something else than the move."""
        return parts


class Downlink(ABC):
    """How x travels to the clients."""

    adopts: ClassVar[str] = "coded"  # the choice that a compressor stands for
    logs: ClassVar[bool] = True  # whether clients keep a copy of x and are sent what they lack
    control: Compressor | None = None  # compresses what `drift` sends

    def check(self, n: int) -> None:  # noqa: B027
        """Raise SpecError if the compressor cannot be used for n values."""

    def init(self, x0: Vector) -> Parts:
        """Return the server's parts before round 0."""
        return {}

    @abstractmethod
    def down(self, server: Bundle, rnd: Round) -> Parts:
        """Return what clients are sent of x."""

    @abstractmethod
    def model(self, down: Bundle) -> Vector:
        """Return x as the clients have it."""

    @abstractmethod
    def send(self, server: Bundle, move: Vector, P: LinearMap, rnd: Round) -> tuple[Vector, Parts]:
        """Return the move that is sent, by which x changes at both ends, and the server's parts."""

    def opened(self, entry: Any, P: LinearMap, rnd: Round) -> Vector:
        """Return the move that a log entry stands for."""
        move: Vector = entry
        return move

    def rest(self, server: Bundle, P: LinearMap, rnd: Round) -> Parts:
        """Return the server's parts after a round without replies."""
        return {}
