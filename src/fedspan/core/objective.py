"""What a method can ask of the clients' losses, and what a task must provide.

Everything is for a whole cohort at once: vectors are (runs, clients, size), see `core.layout`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from fedspan.core.errors import SpecError
from fedspan.core.layout import Arrays, Bools, Floats, Ints, Layout, Measures, Seeds, Vector
from fedspan.core.projector import LinearMap

if TYPE_CHECKING:
    from fedspan.core.round import Round


Direction = Callable[[Vector], Vector]
"""What a local step subtracts at a point, times the learning rate.

A direction may have more than its value at a point. `in_place(start)` is a context manager of a point with the values
of `start` in the model's own memory: the caller changes it in place, and a value at it is overwritten by the next one.
Where `takes_steps` is true, `descend(start, lr, steps)` is the end point of plain steps y ← y − η direction(y).
"""

Plus = Vector | Direction | None
"""What a method adds to a gradient: a vector such as a control, or a function of the point such as μ (y − x)."""


def term(plus: Vector | Direction, y: Vector) -> Vector:
    """What is added at y."""
    return plus if isinstance(plus, torch.Tensor) else plus(y)


def steps_of(epochs: float, batches: Sequence[float]) -> Ints:
    """K_i of clients that make so many passes over their own mini-batches."""
    passes = epochs * np.array(batches, np.float64)
    return np.ceil(passes - 1e-9).clip(1).astype(np.int64)  # 0.7 · 10 is a little above 7


class Objective(ABC):
    """The losses f_i of the clients in a cohort. Each gradient is on a new mini-batch."""

    @abstractmethod
    def grad(self, y: Vector) -> Vector:
        """∇f_i(y; ξ) on the next mini-batch."""

    @abstractmethod
    def full_grad(self, x: Vector) -> Vector:
        """∇f_i(x) on all of the client's data."""

    def begin(self, buffers: Vector | None) -> None:  # noqa: B027 (most objectives have no buffers)
        """Starts from the buffers that the server sends, such as running statistics of norms."""

    def buffers(self) -> Vector | None:
        """The buffers after the local work, which are averaged over the clients."""
        return None

    def direction(self, plus: Plus = None) -> Direction:
        """y ↦ ∇f_i(y; ξ) + plus, or + plus(y)."""
        return self.grad if plus is None else lambda y: self.grad(y) + term(plus, y)

    def restrict(self, x: Vector, P: LinearMap, plus: Vector | None = None) -> Direction:
        """z ↦ P ∇f_i(x + Pᵀz; ξ) + plus. This default forms the full gradient; tasks override it to avoid that."""

        def inside(z: Vector) -> Vector:
            gradient = P @ self.grad(x + P.T @ z)
            return gradient if plus is None else gradient + plus

        return inside


class Flat(Objective):
    """f = 0 of so many clients in each run, for rounds without data."""

    def __init__(self, clients: int = 1) -> None:
        self.clients = clients

    def grad(self, y: Vector) -> Vector:
        return y.new_zeros(y.shape[0], self.clients, y.shape[-1])

    def full_grad(self, x: Vector) -> Vector:
        return self.grad(x)

    def restrict(self, x: Vector, P: LinearMap, plus: Vector | None = None) -> Direction:
        return self.direction(plus)


class Problem(ABC):
    """A task with its data in place, for one or several runs."""

    seeds: Seeds  # one per run
    layout: Layout
    x0: Vector  # (runs, 1, d)
    clients: int  # N
    names: Sequence[str] | None = None  # of the clients; None: they have numbers alone
    weights: Floats | None  # (N,), summing to 1; None: uniform
    steps_per_epoch: int = 1  # mini-batches in one pass over the mean client's examples
    steps: Ints | None = None  # (N,): K_i, where each client has its own
    cohort_mode: Literal["batched", "per_client"] = "batched"  # all clients at once or not
    buffers0: Vector | None = None  # (runs, 1, n): averaged besides x: running statistics
    usage: Mapping[str, Any] = MappingProxyType({})  # how a trained model is used, as plain values

    def drop_start(self) -> None:
        """Keeps of x0 only its shape and type; for a run that has begun and needs the memory of a large model."""
        self.x0 = self.x0.new_zeros(()).expand(self.x0.shape)

    def can_batch(self) -> bool:
        """Whether a problem that is "per_client" could also take all clients of a round as one computation."""
        return False

    def has_formulas(self) -> bool:
        """Whether such a computation needs no autograd, and cannot fail for a network that the loop can train."""
        return False

    def smoothness(self) -> Floats | None:
        """L_i, (runs, N), if the task knows its Hessians; None: they are estimated."""
        return None

    def lowest(self) -> Floats | None:
        """F* of each run, if the task knows it."""
        return None

    def examples(self, client: int) -> int:
        """The number of training examples of a client whose data is on this machine."""
        raise SpecError(
            "this task cannot tell a client's number of examples; set `participation.weights` to 'uniform'"
        )

    def batches_of(self, client: int) -> float:
        """Mini-batches in one pass over the examples of a client whose data is on this machine."""
        raise SpecError(
            "this task cannot tell a client's mini-batches; leave out `training.per_client`"
        )

    @abstractmethod
    def cohort(self, rnd: Round) -> Objective:
        """The objectives of the clients that take part in a round."""

    @abstractmethod
    def evaluate(self, x: Vector, buffers: Vector | None = None) -> Measures:
        """Metrics of a server model: name → one number per run."""

    def state_dict(self, x: Vector, buffers: Vector | None, run: int = 0) -> Arrays:
        """The tensors of one run's model by name, as they are saved."""
        return {
            name: part[0, 0].clone() for name, part in self.layout.split(x[run : run + 1]).items()
        }

    def training_loss(self, x: Vector, buffers: Vector | None = None) -> Floats | None:
        """Mean loss on a fixed sample of the clients' own data, one number per run; None where it is not available."""
        return None

    @abstractmethod
    def diverged(self, metrics: Measures) -> Bools:
        """Which runs have diverged."""
