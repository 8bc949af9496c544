"""A method is a value: a frozen dataclass of hyper-parameters with pure functions over named, immutable state.

`Method` has five required functions. A method that keeps a state at its clients is also `Restorable`, and one that
sends changes of the model instead of the model also `LogsChanges`.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Literal, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from fedspan.core.errors import SpecError
from fedspan.core.footprint import Footprint
from fedspan.core.layout import Layout, Vector
from fedspan.core.objective import Objective


class HasModel(Protocol):
    """What every server state is: something with a model."""

    @property
    def x(self) -> Vector:
        """The model, (runs, 1, d)."""


ServerState = TypeVar("ServerState", bound=HasModel)
ClientState = TypeVar("ClientState")
Down = TypeVar("Down")
Up = TypeVar("Up")
Measures = Mapping[str, npt.NDArray[np.float64]]
DETAILS = ("correction", "correction_test")  # measures in the history and on pages, not in lines of text
LearningRate = float | Literal["search", "auto"]


@dataclass(frozen=True, eq=False)
class Schedule:
    """The cohorts of consecutive rounds; lets a task in the same process prepare several rounds at once."""

    first: int
    ids: npt.NDArray[np.int64]  # (rounds, runs, S)
    rows: npt.NDArray[np.int64]  # (rounds, runs · S): the same as flat numbers run · N + client


def flat_rows(ids: npt.NDArray[np.int64], clients: int) -> npt.NDArray[np.int64]:
    """run · N + client of ids (…, runs, S), as (…, runs · S)."""
    runs = np.arange(0, ids.shape[-2] * clients, clients)
    return (ids + runs[:, None]).reshape(*ids.shape[:-2], -1)


@dataclass(frozen=True)
class Terms:
    """What privacy asks of clients in a round."""

    clip: float  # largest norm of a reply
    leak: float = 0.0  # what controls lose per round
    noise: float = 0.0  # standard deviation of the noise that each client adds, as a multiple of the clip


@dataclass(frozen=True, eq=False)
class Round:
    """What server and clients know of a round without a message, for the clients that take part in it."""

    t: int  # the number of the round, from 0
    seeds: tuple[int, ...]  # one per run
    clients: int  # N
    layout: Layout  # of the model
    ids: npt.NDArray[np.int64]  # (runs, S): who takes part
    last_round: npt.NDArray[np.int64]  # (runs, S): the round in which each one last took part, -1 for none
    weights: torch.Tensor | None = None  # (runs, S, 1): shares w_i of all N clients, which sum to 1; None: 1/N each
    everyone: npt.NDArray[np.int64] | None = None  # (runs, N): `last_round` of all clients; known to the server only
    local_steps: int = 1  # K, so that a task may draw the mini-batches of a round at once
    schedule: Schedule | None = None  # the cohorts of the next rounds, where they are known
    rounds: int | None = None  # length of the run, which a schedule of the step size spans
    overwrite: bool = False  # whether a new state may take the place of the old one, except x: both are large
    privacy: Terms | None = None  # what clients do to their replies
    q: float | None = None  # with privacy: the probability to take part, which is the share that counts

    @property
    def share(self) -> torch.Tensor | float:
        """Σ_S w_i: the share of all clients that takes part; S/N with equal weights, q with privacy."""
        if self.q is not None:
            return self.q
        if self.weights is None:
            return float(self.ids.shape[1] / self.clients)
        return self.weights.sum(1, keepdim=True)

    @property
    def oldest(self) -> int:
        """The earliest round whose change some client may not have received."""
        return 0 if self.everyone is None else max(0, int(self.everyone.min()))

    @property
    def missed_by_any(self) -> int:
        """How many of the last rounds' changes, this one's included, some client with a copy of x lacks after it."""
        if self.everyone is None:
            return self.t + 1
        copies = self.everyone.reshape(-1).copy()
        copies[self.rows] = self.t
        return self.t + 1 - int(copies[copies >= 0].min(initial=self.t))

    @functools.cached_property
    def rows(self) -> npt.NDArray[np.int64]:
        """The cohort as flat numbers run · N + client, in order."""
        if self.schedule is None:
            return flat_rows(self.ids, self.clients)
        known: npt.NDArray[np.int64] = self.schedule.rows[self.t - self.schedule.first]
        return known

    def mean(self, v: Vector) -> Vector:
        """mean_S v: over the clients of the round, by their weights; (runs, S, n) → (runs, 1, n).

        One vector for a round of several clients is what all of them have in common, and its own mean.
        """
        if v.shape[1] == 1 < self.ids.shape[1]:
            return v
        if self.weights is None:
            return v.mean(1, keepdim=True)
        return (self.weights * v).sum(1, keepdim=True) / self.share

    def subset(self, arrived: npt.NDArray[np.int64]) -> Round:
        """The round with some places of the cohort only, the same in every run: those that replied."""
        weights = None if self.weights is None else self.weights[:, arrived]
        ids, last_round = (one.take(arrived, 1) for one in (self.ids, self.last_round))  # in the order of memory
        return replace(self, ids=ids, last_round=last_round, weights=weights, schedule=None)


class Method(ABC, Generic[ServerState, ClientState, Down, Up]):
    """A federated method: five functions over four types.

    `ServerState`, `ClientState`, `Down` and `Up` are frozen dataclasses of vectors (runs, clients, size). The
    functions do not change their arguments. Most methods derive from `LocalSteps` or `InSubspace` in
    `fedspan.methods.base`.
    """

    lr: LearningRate  # η_l
    local_steps: int  # K
    controls: ClassVar[tuple[str, ...]] = ()  # fields that server and clients have in common: a mean, and its parts
    uses_mean_only: ClassVar[bool] = False  # whether this class's `server_step` sees replies by `rnd.mean(v)` alone

    @property
    def spans_run(self) -> bool:
        """Whether the numbers of a round depend on the length of the run, so that it cannot be made longer later."""
        return False

    def without_tests(self) -> Self:
        """The method without what it measures to decide: for differential privacy, and for trials of a few rounds."""
        return self

    @property
    def needs_each_reply(self) -> bool:
        """Whether, in spite of `uses_mean_only`, the method's settings make the server look at single replies."""
        return False

    def check(self, layout: Layout) -> None:
        """Raises SpecError if the method cannot train this model; called before anything is written."""

    def footprint(self, layout: Layout) -> Footprint:
        """What a local step trains on a client's device; the default is a plain step on the full model."""
        return Footprint(layout.size)

    @abstractmethod
    def init_server(self, x0: Vector, layout: Layout) -> ServerState:
        """What the server holds before round 0."""

    @abstractmethod
    def init_client(self, x0: Vector, layout: Layout) -> ClientState:
        """What a client keeps before it first takes part, besides its copy of x.

        It may depend on the shape and type of `x0` only: a client on its own machine has no x0 and is sent x.
        """

    @abstractmethod
    def broadcast(self, server: ServerState, rnd: Round) -> Down:
        """What the server sends to the cohort."""

    @abstractmethod
    def client_step(self, client: ClientState, down: Down, f: Objective, rnd: Round) -> tuple[ClientState, Up]:
        """The local work of the cohort: its new states, and what it sends back."""

    @abstractmethod
    def server_step(self, server: ServerState, up: Up, rnd: Round) -> ServerState:
        """The server's state after the replies of the clients in `rnd`."""

    def model(self, server: ServerState) -> Vector:
        """x."""
        return server.x

    def measures(self, server: ServerState) -> Measures:
        """What a row of the history tells of the server's state, by name: one number per run; nothing by default."""
        return {}

    @classmethod
    def types(cls) -> tuple[type, type, type, type]:
        """The classes of (ServerState, ClientState, Down, Up), from the declaration of the method."""
        found = _arguments(cls)
        if not all(isinstance(argument, type) for argument in found):
            raise SpecError(
                f"{cls.__name__} must name its four types: derive it from Method[ServerState, ClientState, Down, Up], "
                "or so from LocalSteps or InSubspace"
            )
        return typing.cast(tuple[type, type, type, type], found)


AnyMethod = Method[Any, Any, Any, Any]


def needs_mean_only(method: AnyMethod) -> bool:
    """Whether the server needs of the replies nothing but the mean of each vector."""
    own = next(kind for kind in type(method).__mro__ if "server_step" in vars(kind))
    # not inherited: a class with another `server_step` says it again
    return bool(vars(own).get("uses_mean_only")) and not method.needs_each_reply


class Restorable(ABC, Generic[ClientState, Down, Up]):
    """A method that says what a reply does to the state of the client that sent it.

    Every method with a client state needs this on a network: the server can then keep a copy of each state and restore
    it for a client that lost it, and replies can be rounded.
    """

    @property
    def private(self) -> tuple[str, ...]:
        """Fields of the state that follow from the client's data and not from its replies.

        Such as what error feedback has not sent yet. No server can keep a copy; a client that loses them starts again
        with those of `init_client`.
        """
        return ()

    @abstractmethod
    def update_client_state(self, client: ClientState, down: Down, up: Up, rnd: Round) -> ClientState:
        """The states of the cohort after it has replied `up`.

        Private fields come in as `client_step` has them before the reply, and are right at the client only.
        """


class Replayable(Restorable[ClientState, Down, Up]):
    """A method whose client states can be computed again from what the clients sent, for `compact_states`."""

    @abstractmethod
    def state_change(self, up: Up, rnd: Round) -> Vector:
        """The part of a reply from which `replay` makes the new state."""

    @abstractmethod
    def replay(self, client: ClientState, change: Vector, rnd: Round) -> ClientState:
        """The state after a round in which the client sent `change`."""

    def update_client_state(self, client: ClientState, down: Down, up: Up, rnd: Round) -> ClientState:
        return self.replay(client, self.state_change(up, rnd), rnd)


class LogsChanges(ABC, Generic[ServerState]):
    """A method whose server keeps a log of the changes of x and sends each client those it missed."""

    @abstractmethod
    def expand_entry(self, entry: Any, rnd: Round) -> Vector:
        """The change of x, d numbers, that the log entry of round `rnd` stands for."""

    def apply_entry(self, copy: Vector, entry: Any, rnd: Round) -> Vector:
        """A client's copy after the round of a log entry; for methods whose clients copy more than x."""
        moved = self.expand_entry(entry, rnd)
        return copy + moved if moved is entry else moved.add_(copy)

    @abstractmethod
    def empty_round(self, server: ServerState, rnd: Round) -> ServerState:
        """The server's state after a round without replies: x stays, and the log has an entry that says so."""


def restorable(method: AnyMethod) -> Restorable[Any, Any, Any] | None:
    """The method as one that says what becomes of client states; None if its clients keep no state."""
    if isinstance(method, Restorable):
        return method
    if kept := [field.name for field in dataclasses.fields(method.types()[1])]:
        raise SpecError(
            f"clients of {type(method).__name__} keep {', '.join(kept)}, and nothing says what a reply does to that; "
            "derive the class from fedspan.Restorable too and define update_client_state"
        )
    return None


def private_fields(method: AnyMethod) -> tuple[str, ...]:
    """Fields of the client's state that only the client can know."""
    return method.private if isinstance(method, Restorable) else ()


def _arguments(cls: type) -> tuple[Any, ...]:
    """What a class gives for the four types of `Method`, through all generic classes in between."""
    if cls is Method:
        own: tuple[Any, ...] = typing.cast(Any, Method).__parameters__
        return own
    for base in cls.__dict__.get("__orig_bases__", cls.__bases__):
        origin = typing.get_origin(base) or base
        if isinstance(origin, type) and issubclass(origin, Method):
            given = dict(zip(getattr(origin, "__parameters__", ()), typing.get_args(base), strict=False))
            return tuple(given.get(argument, argument) for argument in _arguments(origin))
    raise TypeError(f"{cls.__name__} is not a Method")
