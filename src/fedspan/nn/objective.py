"""f_i of one client in one round, and the directions that its local steps follow.

`clip` and weight decay are applied here and nowhere else, by `finish_`, in every way of simulating a cohort.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fedspan.core import seeds
from fedspan.core.config import Training
from fedspan.core.errors import DataError, SpecError
from fedspan.core.layout import Vector
from fedspan.core.linear_map import LinearMap
from fedspan.core.objective import Direction, InPlaceDirection, Objective, Plus, term
from fedspan.core.privacy import Privacy
from fedspan.core.round import Round
from fedspan.nn.client_data import Batch, NamedTensors, Tensors, client_name, placed
from fedspan.nn.loaders import batch_size_of, batches, drawing
from fedspan.nn.module import FlatModule, Loss, Place, Restricted
from fedspan.replies.noise import new_key, normal, rounded, uniform

if TYPE_CHECKING:
    from fedspan.nn.problem import TorchProblem

PLAIN = Training()
CPU = torch.device("cpu")
BATCH_OF_ONE = "Expected more than 1 value per channel"  # how torch's norms refuse it


def finish_(g: Vector, training: Training, y: Vector, base: Vector | None = None) -> Vector:
    """The gradient as a step uses it, in place: each client's clipped to the norm `clip`, then with weight decay.

    Inside a subspace g is P ∇f, y is z and base is P x; the weights that decay are base + y.
    """
    if training.clip is not None:
        length = g.norm(dim=-1, keepdim=True)
        g.mul_((training.clip / length.clamp_min(1e-12)).clamp_max(1.0))
    if training.weight_decay:
        g.add_(training.weight_decay * (y if base is None else base + y))
    return g


class GradientDirection:
    """y ↦ ∇f(y) + plus, each call on the next batch."""

    def __init__(
        self,
        module: FlatModule | Restricted,
        losses: Iterator[Loss],
        plus: Plus = None,
        training: Training = PLAIN,
        base: Vector | None = None,
    ) -> None:
        self.module, self.losses, self.plus, self.training, self.base = (
            module,
            losses,
            plus,
            training,
            base,
        )

    def __call__(self, y: Vector) -> Vector:
        with torch.inference_mode(False):
            g = self.module.grad(y, next(self.losses)).to(y.device)
        finish_(g, self.training, y, self.base)
        return g if self.plus is None else g + term(self.plus, y)


class InPlaceGradient(GradientDirection, InPlaceDirection):
    """The same for a point in the module's own memory: no vector is copied per step."""

    _place: Place | None = None

    @contextlib.contextmanager
    def in_place(self, start: Vector) -> Iterator[Vector]:
        """See `InPlaceDirection`."""
        with contextlib.ExitStack() as stack:
            with torch.inference_mode(False):
                self._place = stack.enter_context(self.module.in_place(start))
            yield self._place.point
        self._place = None

    def __call__(self, y: Vector) -> Vector:
        if self._place is None or y is not self._place.point:
            return super().__call__(y)
        with torch.inference_mode(False), torch.enable_grad():
            return self._collect(y, self._place.gradient, self._place.backward)

    def _collect(self, y: Vector, g: Vector, backward: Callable[[Loss], None]) -> Vector:
        last = self.plus is not None and (
            self.training.clip is not None or self.training.weight_decay
        )
        if self.plus is None or last:
            g.zero_()
        else:
            g.copy_(term(self.plus, y))  # the backward pass adds to it
        backward(next(self.losses))
        finish_(g, self.training, y, self.base)
        return g.add_(term(self.plus, y)) if last and self.plus is not None else g


class PrivateGradient(GradientDirection):
    """The same with differential privacy for each example (DP-SGD, Abadi et al. 2016).

    The gradient of every example is clipped before they are added, noise is added to the sum, and the divisor is the
    batch size, whatever the number of examples that were drawn. Examples are taken one by one, so that one gradient is
    in memory; inside a subspace it has r numbers.
    """

    def __init__(
        self, privacy: Privacy, expected: int, examples: Iterator[list[Loss]], *rest: Any
    ) -> None:
        super().__init__(rest[0], iter(()), *rest[1:])
        assert privacy.clip is not None
        self.clip, self.noise, self.expected, self.examples = (
            privacy.clip,
            privacy.noise or 0.0,
            expected,
            examples,
        )

    def __call__(self, y: Vector) -> Vector:
        total = torch.zeros_like(y, dtype=torch.float64)
        with torch.inference_mode(False):
            for loss in next(self.examples):
                total = total + clipped_gradient(self.module.grad(y, loss).to(y.device), self.clip)
        scale = self.noise * self.clip
        if scale:  # from the client's own machine, never from a shared seed
            total += scale * normal(new_key(), "example", 0, total.numel()).reshape(total.shape)
            total = rounded(total, scale)
        g = finish_((total / self.expected).to(y.dtype), self.training, y, self.base)
        return g if self.plus is None else g + term(self.plus, y)


def clipped_gradient(g: Vector, clip: float) -> Vector:
    """A gradient in float64 of a norm of at most `clip`; zeros if it is not finite."""
    g = g.double()
    length = g.norm()
    return g * (clip / length).clamp(max=1.0) if torch.isfinite(length) else torch.zeros_like(g)


class TorchObjective(Objective):
    """f_i of one client in one round."""

    def __init__(self, problem: TorchProblem, rnd: Round, client: int) -> None:
        self.problem, self.rnd, self.client = problem, rnd, client
        self.batches = self._draw()
        self._losses = (self._loss(batch, number) for number, batch in enumerate(self.batches))
        self._examples = self._draw_examples()
        problem.model.train()

    def begin(self, buffers: Vector | None) -> None:
        """Starts from the server's running statistics."""
        self.problem.write_buffers(buffers)

    def buffers(self) -> Vector | None:
        """The client's running statistics after its local work."""
        return self.problem.read_buffers()

    def grad(self, y: Vector) -> Vector:
        """∇f_i(y) on the next mini-batch."""
        return self._along(self.problem.module)(y)

    def full_grad(self, x: Vector) -> Vector:
        """∇f_i(x) over all of the client's examples; only mini-batch gradients are clipped."""
        if self.problem.privacy is not None:
            raise SpecError(
                "a gradient over all of a client's data has no noise; with `privacy` use option 'II'"
            )
        source = self.problem.client_data[self.client]
        total = torch.zeros_like(x)
        for number, part in enumerate(
            torch.arange(len(source)).split(batch_size_of(source, self.problem.batch_size))
        ):
            with torch.inference_mode(False):
                batch = placed(source.take(part), self.problem.device)
                g = self.problem.module.grad(x, self._loss(batch, number))
            total = total + g.to(x.device) * (len(part) / len(source))
        return finish_(total, replace(self.problem.training, clip=None), x)

    def direction(self, plus: Plus = None) -> Direction:
        """y ↦ ∇f_i(y) + plus, or + plus(y)."""
        return self._along(self.problem.module, plus)

    def restrict(self, x: Vector, P: LinearMap, plus: Vector | None = None) -> Direction:
        """z ↦ P ∇f_i(x + Pᵀz) + plus, with no full gradient for the fused layers."""
        with torch.inference_mode(False):
            inside = self.problem.activate(x, P)
        return self._along(inside, plus, P @ x if self.problem.training.weight_decay else None)

    def _along(
        self, at: FlatModule | Restricted, plus: Plus = None, base: Vector | None = None
    ) -> GradientDirection:
        if self.problem.privacy is not None:
            rest = (at, plus, self.problem.training, base)
            expected = min(self.problem.batch_size, len(self.problem.client_data[self.client]))
            return PrivateGradient(self.problem.privacy, expected, self._examples, *rest)
        here = self.problem.module.same_dtype and self.problem.device.type == "cpu"
        direct = here and (isinstance(at, FlatModule) or at.direct)
        return (InPlaceGradient if direct else GradientDirection)(
            at, self._losses, plus, self.problem.training, base
        )

    def _loss(self, batch: Batch, number: int) -> Callable[[nn.Module], torch.Tensor]:
        """f on a batch. What the network draws (dropout) is decided by (seed, round, client, step) alone."""

        def loss(model: nn.Module) -> torch.Tensor:
            try:
                with drawing(self._key("dropout", number), self.problem.device):
                    return self.problem.loss(model, batch)
            except ValueError as error:
                if BATCH_OF_ONE not in str(error):
                    raise
                who, why = (
                    client_name(self.client, self.problem.names),
                    "on which BatchNorm cannot be trained",
                )
                raise DataError(
                    f"{who} has a batch of one example, {why}; leave it out, or use larger batches"
                ) from None

        return loss

    def _draw(self) -> Iterator[Batch]:
        """Mini-batches, decided by (seed, round, client) alone; see `nn.loaders` for those of a DataLoader."""
        problem, rnd = self.problem, self.rnd
        source, first = problem.client_data[self.client], rnd.t * rnd.local_steps
        drawn = batches(source, problem.batch_size, functools.partial(self._key, "examples"), first)
        for number, (data, index) in enumerate(drawn):
            if isinstance(data, Tensors):
                batch = data.take(index)
            else:  # a Dataset may draw too, such as random crops
                with drawing(self._key("load", number), CPU):
                    batch = data.take(index)
            yield self.augmented(placed(batch, problem.device), number)

    def _draw_examples(self) -> Iterator[list[Loss]]:
        """Batches of single examples, each in a batch by a coin of the client's own."""
        source, problem = self.problem.client_data[self.client], self.problem
        if not isinstance(source, Tensors | NamedTensors):
            raise SpecError(
                "`privacy` of examples draws them itself; give tensors, not a Dataset or a DataLoader"
            )
        for step in itertools.count():
            drawn = (
                uniform(new_key(), "examples", 0, len(source)) * len(source) < problem.batch_size
            )
            found = []
            for place in drawn.nonzero()[0].tolist():
                number = (
                    step * len(source) + place
                )  # each example has its own augmentation and dropout
                batch = placed(source.take(torch.tensor([place])), problem.device)
                found.append(self._loss(self.augmented(batch, number), number))
            yield found

    def augmented(self, batch: Batch, number: int) -> Batch:
        """The batch of a step as it is trained on."""
        if self.problem.augment is None:
            return batch
        return self.problem.augment(
            batch, torch.Generator().manual_seed(self._key("augment", number) >> 1)
        )

    def _key(self, stream: str, number: int) -> int:
        return seeds.key(self.rnd.seeds[0], stream, self.rnd.t, self.client, number)
