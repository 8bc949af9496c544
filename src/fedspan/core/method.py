"""A method is a value: a frozen dataclass of hyper-parameters with pure functions over named, immutable state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from fedspan.core.bundle import Bundle, Ranges
from fedspan.core.errors import SpecError
from fedspan.core.layout import Layout, Measures, Vector
from fedspan.core.objective import Objective
from fedspan.core.round import Round

# measures in the history and on pages, not in lines of text
DETAILS = ("correction", "correction_test")
LearningRate = float | Literal["search", "auto"]


@dataclass(frozen=True)
class Footprint:
    """What a local step trains on a client's device: the part of a method's costs that no message shows.

    A method with adapters has their ranks: memory is then that of PEFT's step, which forms no full gradients.
    """

    trained: int  # parameters that the step changes
    optimizer: int = 0  # values that its optimizer keeps from step to step
    ranks: Mapping[str, int] | None = None  # name of a block with a low-rank adapter → r
    train_a: bool = True  # whether A of the adapters is trained as well as B


class Method(ABC):
    """A federated method: five functions over states and messages.

    The states of server and clients, downloads and replies are `Bundle`s: named vectors (runs, clients, size). The
    server's state has x, the model. The functions do not change their arguments. Most methods are recipes of `Box` in
    `fedspan.methods.box`. Others derive from `LocalSteps` in `fedspan.methods.base`.

    A download that has a part `sync`, a `ModelSync`, brings x as changes. The method then sets `logs_changes` and
    defines `apply_entry` and `empty_round`.
    """

    lr: LearningRate  # η_l
    local_steps: int  # K
    controls: ClassVar[tuple[str, ...]] = ()  # parts that server and clients have in common
    plain_sum: ClassVar[bool] = False  # whether `server_step` needs the mean of replies alone
    statistics: ClassVar[Mapping[str, Ranges]] = {}  # parts of a reply beside the payload
    private: ClassVar[tuple[str, ...]] = ()  # client parts that replies do not tell
    later: ClassVar[tuple[str, ...]] = ()  # server parts that come after some rounds
    logs_changes: ClassVar[bool] = False  # whether the server keeps a log of the changes of x
    # whether the numbers of a round depend on the length of the run, so that it cannot be made longer later
    spans_run: ClassVar[bool] = False
    # whether the server adds up replies to follow a sum over the clients' states, such as c = mean c_i: such a sum is
    # exact under the plain mean only, and what a robust aggregator leaves out is missing for ever
    follows_states: ClassVar[bool] = False
    own_steps: ClassVar[bool] = (
        False  # whether clients may take different numbers of steps, `Round.steps`
    )

    def without_tests(self) -> Self:
        """Return the method without what it measures to decide: for differential privacy, and for short trials."""
        return self

    def check(self, layout: Layout) -> None:  # noqa: B027
        """Raise SpecError if the method cannot train this model; called before anything is written."""

    def footprint(self, layout: Layout) -> Footprint:
        """Return what a local step trains on a client's device; by default a plain step on the full model."""
        return Footprint(layout.size)

    @abstractmethod
    def init_server(self, x0: Vector, layout: Layout) -> Bundle:
        """Return what the server holds before round 0."""

    @abstractmethod
    def init_client(self, x0: Vector, layout: Layout) -> Bundle:
        """Return what a client keeps before it first takes part, besides its copy of x.

        It may depend on the shape and type of `x0` only: a client on its own machine has no x0 and is sent x.
        """

    @abstractmethod
    def broadcast(self, server: Bundle, rnd: Round) -> Bundle:
        """Return what the server sends to the cohort."""

    @abstractmethod
    def client_step(
        self, client: Bundle, down: Bundle, f: Objective, rnd: Round
    ) -> tuple[Bundle, Bundle]:
        """Return the new states of the cohort after its local work, and what it sends back."""

    @abstractmethod
    def server_step(self, server: Bundle, up: Bundle, rnd: Round) -> Bundle:
        """Return the server's state after the replies of the clients in `rnd`."""

    def update_client_state(self, client: Bundle, down: Bundle, up: Bundle, rnd: Round) -> Bundle:
        """Return the states of the cohort after it has replied `up`.

        With it the server can keep a copy of each state and restore it for a client that lost it. Private parts come
        in as `client_step` has them before the reply, and are right at the client only. A client that loses them
        starts again with those of `init_client`.
        """
        if kept := ", ".join(vars(client)):
            raise SpecError(
                f"clients of {type(self).__name__} keep {kept}, and nothing says what a reply does to that; define "
                "update_client_state"
            )
        return client

    def apply_entry(self, copy: Vector, entry: Any, rnd: Round) -> Vector:
        """Return a client's copy of x after the round of a log entry; `rnd.overwrite` allows to change it in place."""
        raise SpecError(
            f"{type(self).__name__} sends changes of x; define apply_entry and empty_round"
        )

    def empty_round(self, server: Bundle, rnd: Round) -> Bundle:
        """Return the server's state after a round without replies; a log has an entry that leaves x as it is."""
        return server

    def measures(self, server: Bundle) -> Measures:
        """Return what a row of the history shows of the server's state, by name: one number per run."""
        return {}


def is_plain_sum(method: Method) -> bool:
    """Whether the server needs of the replies nothing but the mean of each vector."""
    own = next(kind for kind in type(method).__mro__ if "server_step" in vars(kind))
    return (
        "plain_sum" in vars(own) and method.plain_sum
    )  # a class with another `server_step` says it again
