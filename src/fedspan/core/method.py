"""A method is a value: a frozen dataclass of hyper-parameters with pure functions over named, immutable state."""

from __future__ import annotations

import functools
import typing
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from fedspan.core.layout import Layout, Vector
from fedspan.core.objective import Objective

ServerState = TypeVar("ServerState")
ClientState = TypeVar("ClientState")
Down = TypeVar("Down")
Up = TypeVar("Up")


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


@dataclass(frozen=True, eq=False)
class Round:
    """What both ends know of a round without talking, for the clients that take part in it."""

    t: int
    seeds: tuple[int, ...]  # one a run
    clients: int  # N
    layout: Layout
    ids: npt.NDArray[np.int64]  # (runs, S): who takes part
    last_round: npt.NDArray[np.int64]  # (runs, S): the round each one's copy of x dates from, -1 for none
    weights: torch.Tensor | None = None  # (runs, S, 1): shares w_i of all N clients, which sum to 1; None: 1/N each
    everyone: npt.NDArray[np.int64] | None = None  # (runs, N): `since` of all clients; the server's knowledge
    local_steps: int = 1  # K, so that a task may draw a round's mini-batches at once
    schedule: Schedule | None = None  # whom the server has drawn for the next rounds, where it knows

    @functools.cached_property
    def share(self) -> torch.Tensor | float:
        """Σ_S w_i: the part of all clients that is here; S/N with equal weights."""
        if self.weights is None:
            return float(self.ids.shape[1] / self.clients)
        return self.weights.sum(1, keepdim=True)

    @property
    def oldest(self) -> int:
        """The earliest round that any of the N clients may still have to hear of."""
        return 0 if self.everyone is None else max(0, int(self.everyone.min()))

    @functools.cached_property
    def rows(self) -> npt.NDArray[np.int64]:
        """Where the cohort stands among all runs and clients, as flat numbers run · N + client, in order."""
        return flat_rows(self.ids, self.clients)

    def mean(self, v: Vector) -> Vector:
        """mean_S v: over the clients of the round, by their weights; (runs, S, n) → (runs, 1, n)."""
        if self.weights is None:
            return v.mean(1, keepdim=True)
        return (self.weights * v).sum(1, keepdim=True) / self.share

    def subset(self, arrived: npt.NDArray[np.int64]) -> Round:
        """The round as it stands when only these places of the cohort replied (the same in every run)."""
        weights = None if self.weights is None else self.weights[:, arrived]
        return replace(
            self, ids=self.ids[:, arrived], last_round=self.last_round[:, arrived], weights=weights, schedule=None
        )


class Method(ABC, Generic[ServerState, ClientState, Down, Up]):
    """The five functions of a federated method. The four types are frozen dataclasses of vectors."""

    lr: float | Literal["search", "auto"]  # η_l
    local_steps: int  # K

    @property
    def private(self) -> tuple[str, ...]:
        """Fields of the client's state that follow from its own data and not from what it sends.

        Such as what error feedback has yet to send. No server can keep a copy; a client that loses them begins them
        anew, as `init_client` has them.
        """
        return ()

    def check(self, layout: Layout) -> None:
        """Raise SpecError if the method cannot work on this model; called before anything is written."""

    @abstractmethod
    def init_server(self, x0: Vector, layout: Layout) -> ServerState:
        """What the server holds before round 0."""

    @abstractmethod
    def init_client(self, x0: Vector, layout: Layout) -> ClientState:
        """What one client holds before it first takes part, besides its copy of x.

        It may depend on the shape and type of x0 alone: a client on its own machine has no x0 and is sent x.
        """

    @abstractmethod
    def broadcast(self, server: ServerState, rnd: Round) -> Down:
        """What the server sends to the cohort."""

    @abstractmethod
    def client_step(self, client: ClientState, down: Down, f: Objective, rnd: Round) -> tuple[ClientState, Up]:
        """The local work of the cohort, and what it sends back."""

    @abstractmethod
    def server_step(self, server: ServerState, up: Up, rnd: Round) -> ServerState:
        """Take in the replies of the clients in `rnd`."""

    def skip(self, server: ServerState, rnd: Round) -> ServerState:
        """A round in which nobody replied."""
        return server

    def settle(self, client: ClientState, down: Down, up: Up, rnd: Round) -> ClientState:
        """The state that the cohort has after replying `up`: lets a server keep what its clients keep.

        Private fields come in as `client_step` has left them before the reply, and are right at the client only.
        Methods that do not say it cannot restore a client that lost its state, nor round what they send.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what a reply does to a client's state")

    def trace(self, up: Up, rnd: Round) -> Vector | None:
        """The part of a reply that the client's new state follows from, by `grow`; None: it takes more than that."""
        return None

    def grow(self, client: ClientState, entry: Vector, rnd: Round) -> ClientState:
        """The state after a round whose trace is `entry`; only for methods that have a trace."""
        raise NotImplementedError(f"{type(self).__name__} has no trace from which a state could be made again")

    def model(self, server: ServerState) -> Vector:
        """x."""
        return typing.cast(Vector, server.x)  # type: ignore[attr-defined]

    def expand(self, entry: Any, rnd: Round) -> Vector:
        """The change of x that a log entry of round `rnd` stands for; only for methods that keep a log."""
        raise NotImplementedError(f"{type(self).__name__} sends the whole model and keeps no log")

    @classmethod
    def types(cls) -> tuple[type, type, type, type]:
        """The classes of (ServerState, ClientState, Down, Up), from the declaration of the method."""
        found = _arguments(cls)
        if not all(isinstance(argument, type) for argument in found):
            raise TypeError(f"{cls.__name__} must derive from Method[ServerState, ClientState, Down, Up]")
        return typing.cast(tuple[type, type, type, type], found)


def _arguments(cls: type) -> tuple[Any, ...]:
    """What a class puts for the four types of `Method`, through all the generic classes in between."""
    if cls is Method:
        own: tuple[Any, ...] = typing.cast(Any, Method).__parameters__
        return own
    for base in cls.__dict__.get("__orig_bases__", cls.__bases__):
        origin = typing.get_origin(base) or base
        if isinstance(origin, type) and issubclass(origin, Method):
            given = dict(zip(getattr(origin, "__parameters__", ()), typing.get_args(base), strict=False))
            return tuple(given.get(argument, argument) for argument in _arguments(origin))
    raise TypeError(f"{cls.__name__} is no Method")
