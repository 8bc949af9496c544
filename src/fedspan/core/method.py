"""A method is a value: a frozen dataclass of hyper-parameters with pure functions over named, immutable state.

`Method` has five required functions. A method that keeps a state at its clients is also `Restorable`, and one that
sends changes of the model instead of the model also `LogsChanges`.
"""

from __future__ import annotations

import dataclasses
import typing
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Literal, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from fedspan.core.errors import SpecError
from fedspan.core.footprint import Footprint
from fedspan.core.layout import Layout, Vector
from fedspan.core.objective import Objective
from fedspan.core.round import Round


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
DETAILS = (
    "correction",
    "correction_test",
)  # measures in the history and on pages, not in lines of text
LearningRate = float | Literal["search", "auto"]


class Method(ABC, Generic[ServerState, ClientState, Down, Up]):
    """A federated method: five functions over four types.

    `ServerState`, `ClientState`, `Down` and `Up` are frozen dataclasses of vectors (runs, clients, size). The
    functions do not change their arguments. Most methods derive from `LocalSteps` or `InSubspace` in
    `fedspan.methods.base`.
    """

    lr: LearningRate  # η_l
    local_steps: int  # K
    controls: ClassVar[
        tuple[str, ...]
    ] = ()  # fields that server and clients have in common: a mean, and its parts
    uses_mean_only: ClassVar[bool] = (
        False  # whether this class's `server_step` sees replies by `rnd.mean(v)` alone
    )

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

    @property
    def follows_states(self) -> bool:
        """Whether the server adds up replies to follow a sum over the clients' states, such as c = mean c_i.

        Such a sum is exact under the plain mean only. What a robust aggregator leaves out is missing for ever.
        """
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
    def client_step(
        self, client: ClientState, down: Down, f: Objective, rnd: Round
    ) -> tuple[ClientState, Up]:
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
    it for a client that lost it.
    """

    @property
    def private(self) -> tuple[str, ...]:
        """Fields of the state that follow from the client's data and not from its replies.

        Such as what error feedback has not sent yet. No server can keep a copy; a client that loses them starts again
        with those of `init_client`.
        """
        return ()

    @abstractmethod
    def update_client_state(
        self, client: ClientState, down: Down, up: Up, rnd: Round
    ) -> ClientState:
        """The states of the cohort after it has replied `up`.

        Private fields come in as `client_step` has them before the reply, and are right at the client only.
        """


class LogsChanges(ABC, Generic[ServerState]):
    """A method whose server keeps a log of the changes of x and sends each client those it missed."""

    @abstractmethod
    def expand_entry(self, entry: Any, rnd: Round) -> Vector:
        """The change of x, d numbers, that the log entry of round `rnd` stands for."""

    def apply_entry(self, copy: Vector, entry: Any, rnd: Round) -> Vector:
        """A client's copy after the round of a log entry; for methods whose clients copy more than x."""
        moved = self.expand_entry(entry, rnd)
        return copy + moved if _shares_memory(moved, entry) else moved.add_(copy)

    @abstractmethod
    def empty_round(self, server: ServerState, rnd: Round) -> ServerState:
        """The server's state after a round without replies: x stays, and the log has an entry that says so."""


def _shares_memory(moved: Vector, entry: Any) -> bool:
    """Whether a change is a log entry or a part of it, as with P = I, and must not be overwritten."""
    if not isinstance(entry, torch.Tensor):
        return False
    return moved.untyped_storage().data_ptr() == entry.untyped_storage().data_ptr()


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
            given = dict(
                zip(getattr(origin, "__parameters__", ()), typing.get_args(base), strict=False)
            )
            return tuple(given.get(argument, argument) for argument in _arguments(origin))
    raise TypeError(f"{cls.__name__} is not a Method")
