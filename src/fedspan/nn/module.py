"""A module at x or at x + Pᵀz: writes the point into the weights, and adds ∇f or P ∇f to a flat vector."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedspan.core.errors import SpecError
from fedspan.core.layout import Layout, Vector
from fedspan.core.projector import Factor, LinearMap
from fedspan.nn.layers import restricted_forward
from fedspan.nn.projection_rules import ProjectionRule

Loss = Callable[[nn.Module], Tensor]
Place = tuple[Vector, Vector, Callable[[Loss], None]]
"""A point that steps change in place, the buffer of its gradient, and the backward pass that adds ∇f to it."""


class FlatModule:
    """A module whose trained tensors are views of one flat vector, so that loading x is one copy."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self.model, self.layout = model, layout
        self.checked = False  # whether a gradient has reached every fused layer
        self.shown = False  # whether the weights lie in a vector that is not the module's own
        self.params = [model.get_parameter(block.name) for block in layout.blocks]
        types = sorted({str(p.dtype).removeprefix("torch.") for p in self.params})
        if len(types) > 1:
            raise SpecError(
                f"the model trains tensors of several types ({', '.join(types)}); give it one with model.to()"
            )
        self.flat = self.params[0].detach().new_empty(layout.size)
        # otherwise x has more digits than the weights
        self.same_dtype = self.flat.dtype == layout.dtype
        for parameter, part in zip(self.params, self.views(self.flat), strict=True):
            # one by one, so that no second model is held
            parameter.data = part.copy_(parameter.detach())

    def views(self, flat: Tensor) -> Iterator[Tensor]:
        """The blocks of a flat vector in their shapes."""
        pairs = zip(flat.split(self.layout.sizes), self.layout.blocks, strict=True)
        return (part.view(block.shape) for part, block in pairs)

    def holds(self, x: Vector) -> bool:
        """Whether the weights have the type and the device of x, so that steps can change them in place."""
        return self.same_dtype and x.device == self.flat.device

    def load(self, x: Vector) -> None:
        """Copies the flat vector x into the module."""
        self.own()
        self.flat.copy_(x.view(-1))

    def show(self, x: Vector) -> None:
        """The module's weights are x itself, without a copy; whoever changes them puts them back."""
        with torch.inference_mode(False):  # not an inference tensor, whatever x is
            empty = torch.empty(0, dtype=x.dtype)
        self._move(empty.set_(x.untyped_storage(), x.storage_offset(), [x.numel()], [1]), True)

    def forget(self) -> None:
        """Lets go of the weights, which are zeros that take no memory until the next x comes."""
        self._move(self.flat.new_zeros(1).expand(self.layout.size), True)

    def own(self) -> None:
        """Gives the module memory of its own, without numbers, where it shows a vector."""
        if self.shown:
            with torch.inference_mode(False):
                self._move(torch.empty_like(self.flat), False)

    def _move(self, flat: Tensor, shown: bool) -> None:
        self.flat, self.shown = flat, shown
        for parameter, part in zip(self.params, self.views(flat), strict=True):
            parameter.data = part

    @contextlib.contextmanager
    def in_place(self, start: Vector) -> Iterator[Place]:
        """A point that is the module's own weights, if they have the type and the device of x."""
        here = self.holds(start)
        with torch.inference_mode(False):
            self.load(start)
            point = self.flat if here else start.reshape(-1).clone()
            gradient = torch.empty_like(point)
            pairs = list(zip(self.params, self.views(gradient), strict=True))
            for parameter, part in pairs if here else ():
                parameter.grad = part

        def backward(loss: Loss) -> None:
            with torch.enable_grad():
                if not here:
                    self.load(point)
                loss(self.model).backward()
                for parameter, part in () if here else pairs:
                    if parameter.grad is not None:
                        part.add_(parameter.grad.to(part.device))
                        parameter.grad = None

        try:
            yield point.view(1, 1, -1), gradient.view(1, 1, -1), backward
        finally:
            for parameter in self.params:
                parameter.grad = None

    def grad(self: FlatModule | Restricted, y: Vector, loss: Loss) -> Vector:
        """∇f(y), or P ∇f(x + Pᵀy), on one batch."""
        with self.in_place(y) as (_, gradient, backward):
            gradient.zero_()
            backward(loss)
        return gradient


class Restricted:
    """The same module inside x + range(Pᵀ) for one round; leaving the context restores its layers."""

    def __init__(
        self,
        module: FlatModule,
        rules: Sequence[ProjectionRule],
        x: Vector,
        P: LinearMap,
        borrow: bool = False,
    ) -> None:
        """With `borrow` the weights lie in x itself: steps change it and put it back; needs coordinates everywhere."""
        self.module, self.borrowed = module, borrow
        self.sizes, device = P.sizes, module.flat.device
        (module.show if borrow else module.load)(x)
        parts = module.views(x.detach().view(-1))
        self.pieces = [
            _Piece(module, parameter, factor and factor.to(device), rule, part)
            for parameter, factor, rule, part in zip(
                module.params, P.factors, rules, parts, strict=True
            )
        ]

    def __enter__(self) -> Restricted:
        for piece in self.pieces:
            for layer in piece.layers:
                layer.forward = restricted_forward(layer, piece.leaf, piece.factor)
        return self

    def __exit__(self, *_: object) -> None:
        for piece in self.pieces:
            for layer in piece.layers:
                layer.__dict__.pop("forward", None)

    @contextlib.contextmanager
    def in_place(self, start: Vector) -> Iterator[Place]:
        """A point z. Autograd itself leaves P ∇f in the gradient, except for what it cannot form inside the subspace.

        The first gradient of a module is collected, to see whether one reaches every fused layer.
        """
        with torch.inference_mode(False):
            point = start.reshape(-1).clone()
            gradient = torch.empty_like(point)
        places = list(
            zip(self.pieces, point.split(self.sizes), gradient.split(self.sizes), strict=True)
        )
        direct = self.module.holds(start) and self.module.checked
        collected = []
        for piece, _, part in places:
            at_once = direct and (piece.layers or piece.factor is None)
            piece.leaf.grad = piece.shaped(part) if at_once else None
            if not at_once:
                collected.append((piece, part))

        def backward(loss: Loss) -> None:
            with torch.enable_grad():
                for piece, part, _ in places:
                    piece.write(part.to(self.module.flat.device))
                loss(self.module.model).backward()
                for piece, part in collected:
                    part.add_(piece.collect().to(part.device))
            self.module.checked = True

        try:
            yield point.view(1, 1, -1), gradient.view(1, 1, -1), backward
        finally:
            for piece in self.pieces:
                piece.leaf.grad = None
                if self.borrowed:
                    piece.put_back()

    grad = FlatModule.grad


class _Piece:
    """One block of the module during a round."""

    def __init__(
        self,
        module: FlatModule,
        parameter: nn.Parameter,
        factor: Factor | None,
        rule: ProjectionRule,
        x: Tensor,
    ) -> None:
        self.parameter, self.name, self.axis = parameter, rule.name, rule.axis
        self.factor: Any = factor
        self.layers: list[nn.Module] = []
        self.leaf: Tensor = parameter
        self.index: Tensor | None = None
        self.sent = rule.shape  # of z, whose projected axis is last
        # where the block begins, with all the digits that x has
        start = parameter.detach() if module.same_dtype else x.to(parameter.device)
        self.start: Tensor | None = start
        if factor is not None:
            self.sent = (*rule.shape[: self.axis], *rule.shape[self.axis + 1 :], factor.rank)
        if factor is not None and rule.how == "fused":
            self.layers = [module.model.get_submodule(n) for n in (rule.layer, *rule.also)]
            self.index = None if factor.index is None else factor.index.flatten()
            # a place for the gradient of B; its values are needed only where they tell the last z
            none = parameter.detach().new_zeros(())
            # torch wants its gradient contiguous
            bare = self.index is not None and self.axis == len(self.sent) - 1
            flat = none.expand(self.sent) if bare else none.new_zeros(self.sent)
            self.leaf = flat.movedim(-1, self.axis).requires_grad_()
        if self.index is not None:
            self.start = start.index_select(self.axis, self.index)
        elif self.layers and module.same_dtype:
            self.start = None  # what is added to the weight is known from the last z
        elif module.same_dtype or factor is None:
            self.start = start.clone()  # a part would hold all of x

    @torch.no_grad()
    def write(self, part: Tensor) -> None:
        """Sets the weight to x + Pᵀz for this block."""
        weight, b = self.parameter.detach(), self.shaped(part)
        if self.start is None:
            weight.add_(lift(self.factor, b - self.leaf, self.axis))
            self.leaf.copy_(b)
        elif self.index is not None:
            weight.index_copy_(self.axis, self.index, (self.start + b).to(weight.dtype))
        else:
            moved = b if self.factor is None else lift(self.factor, b, self.axis)
            weight.copy_(self.start + moved)

    def put_back(self) -> None:
        """Makes a borrowed x what it was, to the last bit."""
        assert self.start is not None
        weight = self.parameter.detach()
        if self.index is None:
            weight.copy_(self.start)
        else:
            weight.index_copy_(self.axis, self.index, self.start)

    def shaped(self, part: Tensor) -> Tensor:
        """The block's part of a flat vector, in the shape of its leaf."""
        found = part.view(self.sent)
        return found if self.factor is None else found.movedim(-1, self.axis)

    def collect(self) -> Tensor:
        """The block's part of P ∇f, flat, from the gradient of its leaf."""
        g, self.leaf.grad = self.leaf.grad, None
        if g is None:
            if self.layers and self.leaf.numel():
                raise SpecError(
                    f"{self.name!r} is not used through its own layer in the forward pass; "
                    "name it in `full_modules`"
                )
            return self.leaf.new_zeros(())
        if self.factor is None:
            return g.reshape(-1)
        last = g.movedim(self.axis, -1)
        if not self.layers:  # P is yet to be applied
            assert self.start is not None
            last = self.factor.down(last.to(self.start.dtype).reshape(1, -1, last.shape[-1]))
        return last.reshape(-1)


def lift(factor: Factor, b: Tensor, axis: int = 1) -> Tensor:
    """Pᵀ on the input side: (out, r, …) → (out, in, …)."""
    last = b.movedim(axis, -1)
    up = factor.up(last.reshape(1, -1, factor.rank))
    return up.view(*last.shape[:-1], up.shape[-1]).movedim(-1, axis)
