"""A module at x + Pᵀz: writes z into the weights, runs forward and backward, and returns P ∇f as r flat numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fedspan.core.errors import SpecError
from fedspan.core.layout import Layout, Vector
from fedspan.core.linear_map import Factor, LinearMap, picked
from fedspan.nn.layers import restricted_forward
from fedspan.nn.projection_rules import ProjectionRule
from fedspan.nn.recompute import recomputing

Tensor = torch.Tensor
Loss = Callable[[nn.Module], Tensor]


@dataclass(frozen=True, eq=False)
class Place:
    """A point that steps change in place, and the buffer that collects its gradient."""

    point: Vector
    gradient: Vector
    backward: Callable[[Loss], None]  # moves the weights to the point, and adds ∇f to the gradient


class FlatModule:
    """A module whose trained tensors are views of one flat vector, so that loading x is one copy."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self.model, self.layout, self.checked = model, layout, False
        self.shown = False  # whether the weights lie in a vector that is not the module's own
        named = dict(model.named_parameters())
        types = {named[b.name].dtype for b in layout.blocks}
        if len(types) > 1:
            found = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in types))
            raise SpecError(
                f"the model trains tensors of several types ({found}); give it one with model.to()"
            )
        first = named[layout.blocks[0].name].detach()
        self.flat = first.new_empty(layout.size)
        self.same_dtype = (
            self.flat.dtype == layout.dtype
        )  # otherwise x has more digits than the weights
        self.params: list[nn.Parameter] = []
        for block, part in zip(
            layout.blocks, self._parts(), strict=True
        ):  # one by one, so that no second model is held
            parameter = named[block.name]
            parameter.data = part.view(block.shape).copy_(parameter.detach())
            self.params.append(parameter)

    def _parts(self) -> tuple[Tensor, ...]:
        parts: tuple[Tensor, ...] = self.flat.split([b.size for b in self.layout.blocks])
        return parts

    def load(self, x: Vector) -> None:
        """Copies the flat vector x into the module."""
        self.own()
        self.flat.copy_(x.view(-1))

    def show(self, x: Vector) -> None:
        """The module's weights are x itself, without a copy; whoever changes them puts them back."""
        with torch.inference_mode(False):  # not an inference tensor, whatever x is
            empty = torch.empty(0, dtype=x.dtype)
        self._move(empty.set_(x.untyped_storage(), x.storage_offset(), [x.numel()], [1]))
        self.shown = True

    def forget(self) -> None:
        """Lets go of the weights, which are zeros that take no memory until the next x comes."""
        self._move(self.flat.new_zeros(1).expand(self.layout.size))
        self.shown = True

    def own(self) -> None:
        """Gives the module memory of its own, without numbers, where it shows a vector."""
        if self.shown:
            with torch.inference_mode(False):
                self._move(torch.empty_like(self.flat))
            self.shown = False

    def _move(self, flat: Tensor) -> None:
        self.flat = flat
        for parameter, block, part in zip(
            self.params, self.layout.blocks, self._parts(), strict=True
        ):
            parameter.data = part.view(block.shape)

    def grad(self, y: Vector, loss: Loss) -> Vector:
        """∇f(y), flat."""
        self.load(y)
        with torch.enable_grad():
            found: list[Tensor | None] = list(
                torch.autograd.grad(loss(self.model), self.params, allow_unused=True)
            )
        flat = self.flat.new_zeros(self.layout.size, dtype=self.layout.dtype)
        for number, part in enumerate(flat.split([b.size for b in self.layout.blocks])):
            g, found[number] = (
                found[number],
                None,
            )  # freed one by one, so that no second gradient is held
            if g is not None:
                part.copy_(g.reshape(-1))
        return flat.view(1, 1, -1)

    @contextlib.contextmanager
    def in_place(self, start: Vector) -> Iterator[Place]:
        """The module's own weights as a point."""
        self.load(start)
        gradient = torch.empty_like(self.flat)
        parts = gradient.split([b.size for b in self.layout.blocks])
        for parameter, part, block in zip(self.params, parts, self.layout.blocks, strict=True):
            parameter.grad = part.view(block.shape)

        def backward(loss: Loss) -> None:
            loss(self.model).backward()

        try:
            yield Place(self.flat.view(1, 1, -1), gradient.view(1, 1, -1), backward)
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
        self.module, self.P, self.recompute, self.borrowed = module, P, recompute, borrow
        (module.show if borrow else module.load)(x)
        device = module.flat.device
        factors = (
            P.factors if device.type == "cpu" else tuple(f and f.to(device) for f in P.factors)
        )
        parts = x.detach().view(-1).split([block.size for block in module.layout.blocks])
        self.pieces = [
            _Piece(module, *each)
            for each in zip(range(len(rules)), factors, rules, parts, strict=True)
        ]

    @property
    def direct(self) -> bool:
        """Whether the backward pass itself leaves P ∇f, without a full gradient to project."""
        return all(piece.layers or piece.factor is None for piece in self.pieces)

    def __enter__(self) -> Restricted:
        for piece in self.pieces:
            piece.install(self.recompute)
        return self

    def __exit__(self, *_: object) -> None:
        for piece in self.pieces:
            piece.remove()

    def grad(self, z: Vector, loss: Loss) -> Vector:
        """P ∇f(x + Pᵀz) on one batch."""
        self._write(z.view(-1).to(self.module.flat.device).split(list(self.P.sizes)))
        try:
            with torch.enable_grad():
                found = torch.autograd.grad(
                    self._value(loss), [p.leaf for p in self.pieces], allow_unused=True
                )
        finally:
            self._put_back()
        flat = [piece.collect(g) for piece, g in zip(self.pieces, found, strict=True)]
        return torch.cat(flat).to(z.dtype).view(1, 1, -1)

    @contextlib.contextmanager
    def in_place(self, start: Vector) -> Iterator[Place]:
        """A point z whose gradient is collected without a copy; needs `direct`."""
        point = start.reshape(-1).clone()
        gradient, sizes = torch.empty_like(point), list(self.P.sizes)
        for piece, part in zip(self.pieces, gradient.split(sizes), strict=True):
            piece.leaf.grad = piece.shaped(part)
        parts = point.split(sizes)

        def backward(loss: Loss) -> None:
            self._write(parts)
            with contextlib.nullcontext() if self.module.checked else self._all_used():
                self._value(loss).backward()

        try:
            yield Place(point.view(1, 1, -1), gradient.view(1, 1, -1), backward)
        finally:
            self._put_back()
            for piece in self.pieces:
                piece.leaf.grad = None

    def _put_back(self) -> None:
        """Makes a borrowed x what it was."""
        for piece in self.pieces if self.borrowed else ():
            piece.put_back()

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
        number: int,
        factor: Factor | None,
        rule: ProjectionRule,
        x: Tensor,
    ) -> None:
        self.parameter, self.rule, self.factor = module.params[number], rule, factor
        fused = rule.how == "fused" and factor is not None
        self.layers = (
            [module.model.get_submodule(n) for n in (rule.layer, *rule.also)] if fused else []
        )
        self.shape, self.axis = tuple(rule.shape), rule.axis
        self.leaf: Tensor = self.parameter
        self.index = picked(factor) if fused else None
        # where the block begins, with all the digits that x has
        start = (
            self.parameter.detach()
            if module.same_dtype
            else x.view(self.shape).to(self.parameter.device)
        )
        if factor is not None:
            rest = [n for axis, n in enumerate(self.shape) if axis != self.axis]
            self.sent = (*rest, factor.rank)  # the order in which a LinearMap keeps z
        if (
            self.layers
        ):  # a place for the gradient of B; its values are needed only where they tell the last z
            none = self.parameter.detach().new_zeros(())
            bare = (
                self.index is not None and self.axis == len(self.sent) - 1
            )  # torch wants its gradient contiguous
            flat = none.expand(self.sent) if bare else none.new_zeros(self.sent)
            self.leaf = flat.movedim(-1, self.axis).requires_grad_()
        if self.index is not None:
            self.index = self.index.flatten()
            self.start: Tensor | None = start.index_select(self.axis, self.index)
        elif self.layers and module.same_dtype:
            self.start = None  # what is added to the weight is known from the last z
        else:
            self.start = (
                start.clone() if module.same_dtype or factor is None else start
            )  # a part would hold all of x

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

    def put_back(self) -> None:
        """Sets the weight to x, to the last bit."""
        assert self.start is not None
        weight = self.parameter.detach()
        if self.index is None:
            weight.copy_(self.start)
        else:
            weight.index_copy_(self.axis, self.index, self.start)

    def shaped(self, part: Tensor) -> Tensor:
        """The block's part of a flat vector, in the shape of its leaf."""
        return (
            part.view(self.shape)
            if self.factor is None
            else part.view(self.sent).movedim(-1, self.axis)
        )

    def collect(self, g: Tensor | None) -> Tensor:
        """The block's part of P ∇f, flat."""
        if g is None:
            if self.layers and self.leaf.numel():
                raise SpecError(
                    f"{self.rule.name!r} is not used through its own layer in the forward pass; "
                    "name it in `full_modules`"
                )
            return self.leaf.new_zeros(
                torch.Size(self.shape if self.factor is None else self.sent).numel()
            )
        if self.factor is None:
            return g.reshape(-1)
        inside = (
            g
            if self.layers or self.start is None
            else lower(self.factor, g.to(self.start.dtype), self.axis)
        )
        return inside.movedim(self.axis, -1).reshape(-1)

    def install(self, recompute: bool) -> None:
        for layer in self.layers:
            assert self.factor is not None
            layer.forward = restricted_forward(layer, lambda: self.leaf, self.factor, recompute)

    def remove(self) -> None:
        for layer in self.layers:
            layer.__dict__.pop("forward", None)


def lower(factor: Factor, w: Tensor, axis: int = 1) -> Tensor:
    """P on the input side: (out, in, …) → (out, r, …)."""
    last = w.movedim(axis, -1)
    return (
        factor.down(last.reshape(1, -1, last.shape[-1]))
        .view(*last.shape[:-1], factor.rank)
        .movedim(-1, axis)
    )


def lift(factor: Factor, b: Tensor, axis: int = 1) -> Tensor:
    """Pᵀ on the input side: (out, r, …) → (out, in, …)."""
    last = b.movedim(axis, -1)
    up = factor.up(last.reshape(1, -1, factor.rank))
    return up.view(*last.shape[:-1], up.shape[-1]).movedim(-1, axis)
