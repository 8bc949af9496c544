"""A module at x + Pᵀz: writes z into the weights, runs forward and backward, and returns P ∇f as r flat numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from fedspan.core.errors import SpecError
from fedspan.core.layout import Layout, Vector
from fedspan.core.projector import Factor, LinearMap, picked
from fedspan.nn.layers import restricted_forward
from fedspan.nn.projection_rules import ProjectionRule
from fedspan.nn.recompute import recomputing

Loss = Callable[[nn.Module], Tensor]
Place = tuple[Vector, Vector, Callable[[Loss], None]]
"""A point that steps change in place, the buffer of its gradient, and the backward pass that adds ∇f to it."""


class FlatModule:
    """A module whose trained tensors are views of one flat vector, so that loading x is one copy."""

    direct = True  # see `Restricted.direct`

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self.model, self.layout, self.checked = model, layout, False
        self.shown = False  # whether the weights lie in a vector that is not the module's own
        named = dict(model.named_parameters())
        self.params = [named[block.name] for block in layout.blocks]
        types = {parameter.dtype for parameter in self.params}
        if len(types) > 1:
            found = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in types))
            raise SpecError(
                f"the model trains tensors of several types ({found}); give it one with model.to()"
            )
        self.flat = self.params[0].detach().new_empty(layout.size)
        # otherwise x has more digits than the weights
        self.same_dtype = self.flat.dtype == layout.dtype
        for parameter, part in zip(self.params, self.views(self.flat), strict=True):
            # one by one, so that no second model is held
            parameter.data = part.copy_(parameter.detach())

    def views(self, flat: Tensor) -> Iterator[Tensor]:
        """The blocks of a flat vector in their shapes."""
        parts = flat.split([block.size for block in self.layout.blocks])
        return (
            part.view(block.shape) for part, block in zip(parts, self.layout.blocks, strict=True)
        )

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

    def grad(self, y: Vector, loss: Loss) -> Vector:
        """∇f(y), flat."""
        self.load(y)
        with torch.enable_grad():
            found: list[Tensor | None] = list(
                torch.autograd.grad(loss(self.model), self.params, allow_unused=True)
            )
        flat = self.flat.new_zeros(self.layout.size, dtype=self.layout.dtype)
        for number, part in enumerate(self.views(flat)):
            # freed one by one, so that no second gradient is held
            g, found[number] = found[number], None
            if g is not None:
                part.copy_(g)
        return flat.view(1, 1, -1)

    @contextlib.contextmanager
    def in_place(self, start: Vector) -> Iterator[Place]:
        """The module's own weights as a point."""
        self.load(start)
        gradient = torch.empty_like(self.flat)
        for parameter, part in zip(self.params, self.views(gradient), strict=True):
            parameter.grad = part

        def backward(loss: Loss) -> None:
            loss(self.model).backward()

        try:
            yield self.flat.view(1, 1, -1), gradient.view(1, 1, -1), backward
        finally:
            for parameter in self.params:
                parameter.grad = None


class Restricted:
    """The same module inside x + range(Pᵀ) for one round; leaving the context restores its layers."""

    def __init__(
        self,
        module: FlatModule,
        rules: Sequence[ProjectionRule],
        x: Vector,
        P: LinearMap,
        recompute: bool = False,
        borrow: bool = False,
    ) -> None:
        """With `borrow` the weights lie in x itself: steps change it and put it back; needs coordinates everywhere."""
        self.module, self.recompute, self.borrowed = module, recompute, borrow
        self.sizes = list(P.sizes)
        (module.show if borrow else module.load)(x)
        device, factors = module.flat.device, P.factors
        if device.type != "cpu":
            factors = tuple(factor and factor.to(device) for factor in factors)
        parts = module.views(x.detach().view(-1))
        self.pieces = [
            _Piece(module, *each) for each in zip(module.params, factors, rules, parts, strict=True)
        ]
        # whether the backward pass itself leaves P ∇f, without a full gradient to project
        self.direct = all(piece.layers or piece.factor is None for piece in self.pieces)

    def __enter__(self) -> Restricted:
        for piece in self.pieces:
            for layer in piece.layers:
                assert piece.factor is not None
                layer.forward = restricted_forward(layer, piece.leaf, piece.factor, self.recompute)
        return self

    def __exit__(self, *_: object) -> None:
        for piece in self.pieces:
            for layer in piece.layers:
                layer.__dict__.pop("forward", None)

    def grad(self, z: Vector, loss: Loss) -> Vector:
        """P ∇f(x + Pᵀz) on one batch."""
        self._write(z.view(-1).to(self.module.flat.device).split(self.sizes))
        leaves = [piece.leaf for piece in self.pieces]
        try:
            with torch.enable_grad():
                found = torch.autograd.grad(self._value(loss), leaves, allow_unused=True)
        finally:
            self._put_back()
        flat = [piece.collect(g) for piece, g in zip(self.pieces, found, strict=True)]
        return torch.cat(flat).to(z.dtype).view(1, 1, -1)

    @contextlib.contextmanager
    def in_place(self, start: Vector) -> Iterator[Place]:
        """A point z whose gradient is collected without a copy; needs `direct`."""
        point = start.reshape(-1).clone()
        gradient, parts = torch.empty_like(point), point.split(self.sizes)
        for piece, part in zip(self.pieces, gradient.split(self.sizes), strict=True):
            piece.leaf.grad = piece.shaped(part)

        def backward(loss: Loss) -> None:
            self._write(parts)
            with contextlib.nullcontext() if self.module.checked else self._all_used():
                self._value(loss).backward()

        try:
            yield point.view(1, 1, -1), gradient.view(1, 1, -1), backward
        finally:
            self._put_back()
            for piece in self.pieces:
                piece.leaf.grad = None

    def _put_back(self) -> None:
        """Makes a borrowed x what it was, to the last bit."""
        for piece in self.pieces if self.borrowed else ():
            assert piece.start is not None
            weight = piece.parameter.detach()
            if piece.index is None:
                weight.copy_(piece.start)
            else:
                weight.index_copy_(piece.axis, piece.index, piece.start)

    @contextlib.contextmanager
    def _all_used(self) -> Iterator[None]:
        """Checks once that a gradient reaches every fused layer."""
        reached: set[int] = set()
        hooks = [
            p.leaf.register_post_accumulate_grad_hook(lambda leaf: reached.add(id(leaf)))
            for p in self.pieces
        ]
        yield
        for hook in hooks:
            hook.remove()
        for piece in self.pieces:
            if id(piece.leaf) not in reached:
                piece.collect(None)
        self.module.checked = True

    def _write(self, parts: Sequence[Tensor]) -> None:
        for piece, part in zip(self.pieces, parts, strict=True):
            piece.write(part)

    def _value(self, loss: Loss) -> Tensor:
        """f on one batch, ready for a backward pass."""
        with recomputing() if self.recompute else contextlib.nullcontext():
            return loss(self.module.model)


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
        self.parameter, self.rule, self.factor = parameter, rule, factor
        self.shape, self.axis = tuple(rule.shape), rule.axis
        self.sent = self.shape  # the order in which a LinearMap keeps z
        self.layers: list[nn.Module] = []
        self.leaf: Tensor = parameter
        self.index: Tensor | None = None
        # where the block begins, with all the digits that x has
        start = parameter.detach() if module.same_dtype else x.to(parameter.device)
        self.start: Tensor | None = start
        if factor is not None:
            rest = [n for axis, n in enumerate(self.shape) if axis != self.axis]
            self.sent = (*rest, factor.rank)
        if factor is not None and rule.how == "fused":
            self.layers = [module.model.get_submodule(n) for n in (rule.layer, *rule.also)]
            chosen = picked(factor)
            self.index = None if chosen is None else chosen.flatten()
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

    def write(self, part: Tensor) -> None:
        """Sets the weight to x + Pᵀz for this block."""
        with torch.no_grad():
            weight, b = self.parameter.detach(), self.shaped(part)
            if self.index is not None and self.start is not None:
                weight.index_copy_(self.axis, self.index, (self.start + b).to(weight.dtype))
            elif self.start is not None:
                weight.copy_(
                    self.start + (b if self.factor is None else lift(self.factor, b, self.axis))
                )
            else:
                assert self.factor is not None
                weight.add_(lift(self.factor, b - self.leaf, self.axis))
            if self.layers and self.index is None:
                self.leaf.copy_(b)

    def shaped(self, part: Tensor) -> Tensor:
        """The block's part of a flat vector, in the shape of its leaf."""
        found = part.view(self.sent)
        return found if self.factor is None else found.movedim(-1, self.axis)

    def collect(self, g: Tensor | None) -> Tensor:
        """The block's part of P ∇f, flat."""
        if g is None:
            if self.layers and self.leaf.numel():
                raise SpecError(
                    f"{self.rule.name!r} is not used through its own layer in the forward pass; "
                    "name it in `full_modules`"
                )
            return self.leaf.new_zeros(torch.Size(self.sent).numel())
        if self.factor is None:
            return g.reshape(-1)
        last = g.movedim(self.axis, -1)
        if not self.layers and self.start is not None:  # P is yet to be applied
            last = last.to(self.start.dtype).reshape(1, -1, last.shape[-1])
            last = self.factor.down(last)
        return last.reshape(-1)


def lift(factor: Factor, b: Tensor, axis: int = 1) -> Tensor:
    """Pᵀ on the input side: (out, r, …) → (out, in, …)."""
    last = b.movedim(axis, -1)
    up = factor.up(last.reshape(1, -1, factor.rank))
    return up.view(*last.shape[:-1], up.shape[-1]).movedim(-1, axis)
