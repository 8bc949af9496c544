"""f_i of the clients of a round, of one client or of all as one computation, and the directions of local steps.

A cohort is batched in two ways. Chains of plain layers with a known loss have their backward pass written by hand
(`nn.chain`). Other networks go through `torch.func.vmap` over the clients' weights and mini-batches, which is faster
than client by client for plain matrix products and slower for convolutions. Both need batches of equal shape, no
running statistics and no randomness inside the network.

`clip` and weight decay are applied here and nowhere else, by `Finish`, in every way of simulating a cohort.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedspan.core import seeds
from fedspan.core.config import Training
from fedspan.core.errors import DataError, SpecError, client_name
from fedspan.core.layout import Vector
from fedspan.core.objective import Direction, Objective, Plus, term
from fedspan.core.projector import LinearMap
from fedspan.core.round import Round
from fedspan.nn.batches import Batch, Tensors, batch_size_of, batches, drawing, placed
from fedspan.nn.chain import ChainDirection, Parts
from fedspan.nn.module import FlatModule, Loss, Place, Restricted
from fedspan.replies.noise import new_key, normal, rounded, uniform

if TYPE_CHECKING:
    from fedspan.nn.problem import TorchProblem

BATCH_OF_ONE = "Expected more than 1 value per channel"  # how torch's norms refuse it


class Finish:
    """What a local step makes of a gradient, in place: clipped for each client, with weight decay, plus a method's own.

    Inside a subspace the gradient is P ∇f and the point z; the weights that decay are P x + z.
    """

    def __init__(
        self,
        training: Training,
        plus: Plus = None,
        x: Vector | None = None,
        P: LinearMap | None = None,
    ) -> None:
        self.clip, self.decay, self.plus = training.clip, training.weight_decay, plus
        self.bare = self.clip is None and not self.decay  # whether nothing but `plus` is done
        self.base = P @ x if self.decay and P is not None and x is not None else None

    def __call__(self, g: Vector, y: Vector) -> Vector:
        if self.clip is not None:
            length = g.norm(dim=-1, keepdim=True)
            g.mul_((self.clip / length.clamp_min(1e-12)).clamp_max(1.0))
        if self.decay:
            g.add_(self.decay * (y if self.base is None else self.base + y))
        return g if self.plus is None else g.add_(term(self.plus, y))


class GradientDirection:
    """y ↦ ∇f(y) + plus, each call on the next batch; at the point of `in_place` no vector is copied per step."""

    def __init__(
        self, module: FlatModule | Restricted, losses: Iterator[Loss], finish: Finish
    ) -> None:
        self.module, self.losses, self.finish = module, losses, finish
        self._place: Place | None = None

    @contextlib.contextmanager
    def in_place(self, start: Vector) -> Iterator[Vector]:
        """See `Direction`."""
        with self.module.in_place(start) as self._place:
            yield self._place[0]
        self._place = None

    def __call__(self, y: Vector) -> Vector:
        if self._place is None or y is not self._place[0]:
            with self.in_place(y) as y:
                return self(y)
        (_, g, backward), plus = self._place, self.finish.plus
        begun = plus is not None and self.finish.bare
        if plus is not None and begun:
            g.copy_(term(plus, y))  # the backward pass adds to it
        else:
            g.zero_()
        with torch.inference_mode(False):
            backward(next(self.losses))
        return g if begun else self.finish(g, y)


class TorchObjective(Objective):
    """f_i of one client in one round."""

    def __init__(self, problem: TorchProblem, rnd: Round, client: int) -> None:
        self.problem, self.rnd, self.client = problem, rnd, client
        self._losses: Iterator[Any] = self._draw()
        if problem.privacy is not None:
            self._losses = self._draw_examples()
        problem.model.train()

    def begin(self, buffers: Vector | None) -> None:
        """Starts from the server's running statistics."""
        self.problem.write_buffers(buffers)

    def buffers(self) -> Vector | None:
        """The client's running statistics after its local work."""
        return self.problem.read_buffers()

    def grad(self, y: Vector) -> Vector:
        """∇f_i(y) on the next mini-batch."""
        return self.direction()(y)

    @torch.inference_mode(False)
    def full_grad(self, x: Vector) -> Vector:
        """∇f_i(x) over all of the client's examples; only mini-batch gradients are clipped."""
        problem, source = self.problem, self.problem.client_data[self.client]
        if problem.privacy is not None:
            raise SpecError(
                "a gradient over all of a client's data has no noise; with `privacy` use those of mini-batches"
            )
        parts = torch.arange(len(source)).split(batch_size_of(source, problem.batch_size))
        total = torch.zeros_like(x)
        for number, part in enumerate(parts):
            batch = placed(source.take(part), problem.device)
            g = problem.module.grad(x, self._loss(batch, number))
            total = total + g * (len(part) / len(source))
        return Finish(replace(problem.training, clip=None))(total, x)

    def direction(self, plus: Plus = None) -> Direction:
        """y ↦ ∇f_i(y) + plus, or + plus(y)."""
        return self._along(self.problem.module, Finish(self.problem.training, plus))

    def restrict(self, x: Vector, P: LinearMap, plus: Vector | None = None) -> Direction:
        """z ↦ P ∇f_i(x + Pᵀz) + plus, with no full gradient for the fused layers."""
        with torch.inference_mode(False):
            inside = self.problem.activate(x, P)
        return self._along(inside, Finish(self.problem.training, plus, x, P))

    def _along(self, at: FlatModule | Restricted, finish: Finish) -> Direction:
        if self.problem.privacy is None:
            return GradientDirection(at, self._losses, finish)
        return lambda y: finish(self._private(at, y), y)

    @torch.inference_mode(False)
    def _private(self, at: FlatModule | Restricted, y: Vector) -> Vector:
        """∇f(y) with differential privacy for each example (DP-SGD, Abadi et al. 2016).

        The gradient of every example is clipped before they are added, noise is added to the sum, and the divisor is
        the batch size, whatever the number of examples that were drawn. Examples are taken one by one, so that one
        gradient is in memory; inside a subspace it has r numbers.
        """
        problem, privacy = self.problem, self.problem.privacy
        assert privacy is not None
        assert privacy.clip is not None
        scale, total = (privacy.noise or 0.0) * privacy.clip, torch.zeros_like(y).double()
        for loss in next(self._losses):
            g = at.grad(y, loss).double()
            length = g.norm()
            if torch.isfinite(length):  # an example without a gradient counts as zeros
                total = total + g * (privacy.clip / length).clamp(max=1.0)
        if scale:  # from the client's own machine, never from a shared seed
            noise = normal(new_key(), "example", 0, total.numel()).reshape(total.shape)
            total = rounded(total + scale * noise, scale)
        expected = min(problem.batch_size, len(problem.client_data[self.client]))
        return (total / expected).to(y.dtype)

    def _loss(self, batch: Batch, number: int) -> Loss:
        """f on a batch. What the network draws (dropout) is decided by (seed, round, client, step) alone."""

        def loss(model: nn.Module) -> Tensor:
            try:
                with drawing(self._key("dropout", number), self.problem.device):
                    return self.problem.loss(model, batch)
            except ValueError as error:
                if BATCH_OF_ONE not in str(error):
                    raise
                raise DataError(
                    f"{client_name(self.client, self.problem.names)} has a batch of one example, on which BatchNorm "
                    "cannot be trained; leave it out, or use larger batches"
                ) from None

        return loss

    def _draw(self) -> Iterator[Loss]:
        """Mini-batches, decided by (seed, round, client) alone; see `nn.batches` for those of a DataLoader."""
        problem, rnd = self.problem, self.rnd
        each = rnd.local_steps if rnd.steps is None else int(rnd.steps)  # K_i
        source, key = problem.client_data[self.client], functools.partial(self._key, "examples")
        drawn = batches(source, problem.batch_size, key, rnd.t * each)
        for number, (data, index) in enumerate(drawn):
            draws = not isinstance(data, Tensors)  # a Dataset may, such as random crops
            with drawing(self._key("load", number)) if draws else contextlib.nullcontext():
                batch = data.take(index)
            yield self._loss(self.augmented(batch, number), number)

    def _draw_examples(self) -> Iterator[list[Loss]]:
        """Batches of single examples, each in a batch by a coin of the client's own."""
        source, problem = self.problem.client_data[self.client], self.problem
        if not isinstance(source, Tensors):
            raise SpecError(
                "`privacy` of examples draws them itself; give tensors, not a Dataset or a DataLoader"
            )
        for step in itertools.count():
            coins, found = uniform(new_key(), "examples", 0, len(source)), []
            for place in (coins * len(source) < problem.batch_size).nonzero()[0].tolist():
                # each example has its own augmentation and dropout
                number, batch = step * len(source) + place, source.take(torch.tensor([place]))
                found.append(self._loss(self.augmented(batch, number), number))
            yield found

    def augmented(self, batch: Batch, number: int) -> Batch:
        """The batch of a step as it is trained on."""
        batch = placed(batch, self.problem.device)
        if self.problem.augment is None:
            return batch
        generator = torch.Generator().manual_seed(self._key("augment", number) >> 1)
        return self.problem.augment(batch, generator)

    def _key(self, stream: str, number: int) -> int:
        return seeds.key(self.rnd.seeds[0], stream, self.rnd.t, self.client, number)


class Cohort(Objective):
    """f_i of all clients of a round, together."""

    def __init__(self, problem: TorchProblem, rnd: Round) -> None:
        self.problem, self.rnd = problem, rnd
        self.batches = _draw_all(problem, rnd)
        problem.model.train()

    def grad(self, y: Vector) -> Vector:
        """∇f_i(y) of every client on its next mini-batch."""
        return self.direction()(y)

    def full_grad(self, x: Vector) -> Vector:
        """∇f_i(x) of every client over all its examples, one after the other."""
        alone = [TorchObjective(self.problem, self.rnd, i) for i in self.rnd.ids[0].tolist()]
        return torch.cat([one.full_grad(x) for one in alone], 1)

    def direction(self, plus: Plus = None) -> Direction:
        """y ↦ ∇f_i(y) + plus, or + plus(y)."""
        return self.restrict(None, None, plus)

    def restrict(self, x: Vector | None, P: LinearMap | None, plus: Plus = None) -> Direction:
        """z ↦ P ∇f_i(x + Pᵀz) + plus; clipped is what a step uses, P ∇f."""
        problem, batches, clients = self.problem, self.batches, self.rnd.ids.size
        layout, finish = problem.layout, Finish(problem.training, plus, x, P)
        if problem.formulas is not None:
            return ChainDirection(problem.formulas, layout, clients, x, P, batches, finish)

        def loss(weights: dict[str, Tensor], *batch: Tensor) -> Tensor:
            def model(*args: Any, **kwargs: Any) -> Any:
                return functional_call(problem.model, weights, args, kwargs)

            return problem.loss(model, batch)  # type: ignore[arg-type]

        def by_vmap(y: Vector) -> Vector:
            parts, place = next(batches)
            at = y if P is None or x is None else x + P.T @ y
            with torch.inference_mode(False), torch.no_grad():
                weights = layout.split(at.expand(1, clients, -1)[0].clone())
                found = vmap(grad(loss))(weights, *(part[:, place].clone() for part in parts))
                g = layout.join({name: part.unsqueeze(0) for name, part in found.items()})
            return finish(g if P is None else P @ g, y)

        return by_vmap


def _draw_all(problem: TorchProblem, rnd: Round) -> Iterator[tuple[Parts, slice]]:
    """Mini-batches of every client without end: examples that were gathered for K steps, and which of them to take.

    It does not know the `Cohort` that holds it: in a cycle, what was gathered would wait for the garbage collector.
    """
    clients, steps = rnd.ids[0].tolist(), rnd.local_steps
    every = [problem.client_data[client].parts for client in clients]
    lengths = [len(parts[0]) for parts in every]
    batch = min(problem.batch_size, lengths[0])
    keys = seeds.children(seeds.keys(rnd.seeds[:1], "examples", rnd.t), rnd.ids[0])
    alike = ([keys], lengths[:1]) if len(set(lengths)) == 1 else (keys[:, None], lengths)
    alone = [TorchObjective(problem, rnd, i) for i in clients if problem.augment is not None]
    for step in itertools.count(0, steps):
        index = torch.cat(
            [_shuffled(of, n, step * batch, steps * batch) for of, n in zip(*alike, strict=True)]
        )
        gathered: Parts = tuple(part.new_empty(*index.shape, *part.shape[1:]) for part in every[0])
        for column, out in zip(zip(*every, strict=True), gathered, strict=True):
            for part, taken, place in zip(column, index, out, strict=True):
                torch.index_select(part, 0, taken, out=place)
        for k in range(steps):
            which = slice(k * batch, (k + 1) * batch)
            if problem.augment is None:
                yield gathered, which
                continue
            drawn = zip(alone, *(part[:, which] for part in gathered), strict=True)
            found = [one.augmented(tuple(own), step + k) for one, *own in drawn]
            if len({own[0].shape for own in found}) > 1:
                raise SpecError(
                    "`augment` gives batches of several shapes; set engine.simulate to 'loop'"
                )
            yield tuple(map(torch.stack, zip(*found, strict=True))), slice(None)


def _shuffled(of: seeds.Keys, n: int, start: int, count: int) -> Tensor:
    """`count` numbers from place `start` on of the shuffled passes of several clients with n examples each.

    They are those of `nn.batches`, pass after pass; `of` has one key per client.
    """
    passes = range(start // n, -(-(start + count) // n))
    drawn = [seeds.permute(seeds.children(of, np.array(number)), n) for number in passes]
    return torch.from_numpy(np.concatenate(drawn, -1))[:, start % n :][:, :count]
