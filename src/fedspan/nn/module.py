"""A module at x + Pᵀz: writes z into the weights, runs forward and backward, and returns P ∇f as r flat numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from fedspan.core.errors import SpecError
from fedspan.core.layout import Layout, Vector
from fedspan.core.objective import Plus, term
from fedspan.core.projector import Factor, LinearMap
from fedspan.nn.layers import restricted_forward
from fedspan.nn.projection_rules import ProjectionRule
from fedspan.nn.recompute import exchanging

Tensor = torch.Tensor
Loss = Callable[[nn.Module], Tensor]


class FlatModule:
    """A module whose trained tensors are views of one flat vector, so that loading x is one copy."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self.model, self.layout, self.checked = model, layout, False
        named = dict(model.named_parameters())
        types = {named[b.name].dtype for b in layout.blocks}
        if len(types) > 1:
            raise SpecError(
                f"the model trains tensors of several types ({_listed(types)}); give it one with model.to()"
            )
        first = named[layout.blocks[0].name].detach()
        self.flat = first.new_empty(layout.size)
        self.in_place = self.flat.dtype == layout.dtype  # else x has more digits than the weights
        parts = self.flat.split([b.size for b in layout.blocks])
        self.params: list[nn.Parameter] = []
        for block, part in zip(layout.blocks, parts, strict=True):  # one by one, so that no second model is held
            parameter = named[block.name]
            parameter.data = part.view(block.shape).copy_(parameter.detach())
            self.params.append(parameter)

    def load(self, x: Vector) -> None:
        """Put the flat vector x into the module."""
        self.flat.copy_(x.view(-1))

    def grad(self, y: Vector, loss: Loss) -> Vector:
        """∇f(y), flat."""
        self.load(y)
        with torch.enable_grad():
            found: list[Tensor | None] = list(torch.autograd.grad(loss(self.model), self.params, allow_unused=True))
        flat = self.flat.new_zeros(self.layout.size, dtype=self.layout.dtype)
        for number, part in enumerate(flat.split([b.size for b in self.layout.blocks])):
            g, found[number] = found[number], None  # let go of one by one, so that no second gradient is held
            if g is not None:
                part.copy_(g.reshape(-1))
        return flat.view(1, 1, -1)

    def walk(
        self, y: Vector, plus: Plus, losses: Iterator[Loss], lr: float, steps: int, clip: float | None = None
    ) -> Vector:
        """y ← y − η (∇f(y) + plus), `steps` times in place."""
        self.load(y)
        total = torch.empty_like(self.flat)
        sizes = [b.size for b in self.layout.blocks]
        for parameter, part, block in zip(self.params, total.split(sizes), self.layout.blocks, strict=True):
            parameter.grad = part.view(block.shape)
        _walk(self.flat, total, plus, lambda: next(losses)(self.model), lr, steps, clip)
        for parameter in self.params:
            parameter.grad = None
        return self.flat.clone().view(1, 1, -1)


def _walk(
    y: Tensor,
    total: Tensor,
    plus: Plus,
    loss: Callable[[], Tensor],
    lr: float,
    steps: int,
    clip: float | None,
    wrote: Callable[[], None] = lambda: None,
) -> None:
    """Plain steps; `wrote` is told after each change of y.

    `total` is where backward leaves the gradient, on top of `plus` unless the gradient must be clipped before.
    """
    point = y.view(1, 1, -1)  # as a Vector: it moves with y
    with torch.enable_grad():
        for _ in range(steps):
            if plus is None or clip is not None:
                total.zero_()
            else:
                total.copy_(term(plus, point).reshape(-1))
            loss().backward()
            if clip is not None:
                total.mul_(shrink(total, clip))
                total.add_(0.0 if plus is None else term(plus, point).reshape(-1))
            y.add_(total, alpha=-lr)
            wrote()


def shrink(g: Tensor, clip: float) -> Tensor:
    """What g is to be multiplied by so that it is no longer than `clip`."""
    length: Tensor = g.norm(dim=-1, keepdim=True)
    return (clip / length.clamp_min(1e-12)).clamp_max(1.0)


class Restricted:
    """The same module inside x + range(Pᵀ) for one round; `with` puts its layers back as they were."""

    def __init__(
        self, module: FlatModule, choices: Sequence[ProjectionRule], x: Vector, P: LinearMap, recompute: bool = False
    ) -> None:
        self.module, self.P, self.choices, self.recompute = module, P, choices, recompute
        module.load(x)
        here = module.flat.device
        factors = P.factors if here.type == "cpu" else tuple(f and f.to(here) for f in P.factors)
        parts = x.detach().view(-1).split([block.size for block in module.layout.blocks])
        self.pieces = [_Piece(module, *each) for each in zip(range(len(choices)), factors, choices, parts, strict=True)]

    def __enter__(self) -> Restricted:
        for piece in self.pieces:
            piece.install(self.recompute)
        return self

    def __exit__(self, *_: object) -> None:
        for piece in self.pieces:
            piece.remove()

    def grad(self, z: Vector, loss: Loss) -> Vector:
        """P ∇f(x + Pᵀz) on one batch."""
        parts = z.view(-1).to(self.module.flat.device).split(list(self.P.sizes))
        for piece, part in zip(self.pieces, parts, strict=True):
            piece.write(part)
        with torch.enable_grad():
            found = torch.autograd.grad(self._value(loss), [p.leaf for p in self.pieces], allow_unused=True)
        flat = [piece.collect(g) for piece, g in zip(self.pieces, found, strict=True)]
        return torch.cat(flat).to(z.dtype).view(1, 1, -1)

    def walk(
        self, z: Vector, plus: Vector | None, losses: Iterator[Loss], lr: float, steps: int, clip: float | None = None
    ) -> Vector:
        """z ← z − η (P ∇f(x + Pᵀz) + plus), `steps` times in place."""
        if not self.module.checked:  # the slow way once: it sees whether every layer is really used
            self.module.checked = True
            for _ in range(steps):
                d = self.grad(z, next(losses))
                d = d if clip is None else d * shrink(d, clip)
                z = torch.add(z, d if plus is None else d + plus, alpha=-lr)
            return z
        place = z.reshape(-1).clone()
        total = torch.empty_like(place)
        sizes = list(self.P.sizes)
        for piece, part in zip(self.pieces, total.split(sizes), strict=True):
            piece.leaf.grad = piece.seen(part)
        parts = place.split(sizes)

        def write() -> None:
            for piece, part in zip(self.pieces, parts, strict=True):
                piece.write(part)

        write()
        _walk(place, total, plus, lambda: self._value(next(losses)), lr, steps, clip, write)
        for piece in self.pieces:
            piece.leaf.grad = None
        return place.view(1, 1, -1)

    def _value(self, loss: Loss) -> Tensor:
        """f on one batch, ready for a backward pass."""
        with exchanging() if self.recompute else contextlib.nullcontext():
            return loss(self.module.model)


class _Piece:
    """One block of the module during a round."""

    def __init__(
        self, module: FlatModule, number: int, factor: Factor | None, choice: ProjectionRule, x: Tensor
    ) -> None:
        self.parameter, self.choice, self.factor = module.params[number], choice, factor
        covered = choice.how == "covered" and factor is not None
        self.layers = [module.model.get_submodule(n) for n in (choice.layer, *choice.also)] if covered else []
        self.shape, self.axis = tuple(choice.shape), choice.axis
        self.leaf: Tensor = self.parameter
        self.index = getattr(factor, "index", None) if covered else None
        # where the block begins, with all the digits that x has
        start = x.view(self.shape).to(self.parameter.device) if not module.in_place else self.parameter.detach()
        if factor is not None:
            rest = [n for axis, n in enumerate(self.shape) if axis != self.axis]
            self.sent = (*rest, factor.rank)  # the order in which a LinearMap keeps z
        if self.layers:  # a place for the gradient of B; its values are needed only where they tell the last z
            none = self.parameter.detach().new_zeros(())
            bare = self.index is not None and self.axis == len(self.sent) - 1  # torch wants its gradient contiguous
            flat = none.expand(self.sent) if bare else none.new_zeros(self.sent)
            self.leaf = flat.movedim(-1, self.axis).requires_grad_()
        if self.index is not None:
            self.index = self.index.flatten()
            self.start: Tensor | None = start.index_select(self.axis, self.index)
        elif self.layers and module.in_place:
            self.start = None  # what is added to the weight is known from the last z
        else:
            self.start = start.clone() if module.in_place or factor is None else start  # a part would hold all of x

    def write(self, part: Tensor) -> None:
        """Set the weight to x + Pᵀz for this block."""
        with torch.no_grad():
            weight, b = self.parameter.detach(), self.seen(part)
            if self.index is not None and self.start is not None:
                weight.index_copy_(self.axis, self.index, (self.start + b).to(weight.dtype))
            elif self.start is not None:
                weight.copy_(self.start + (b if self.factor is None else lift(self.factor, b, self.axis)))
            else:
                assert self.factor is not None
                weight.add_(lift(self.factor, b - self.leaf, self.axis))
            if self.layers and self.index is None:
                self.leaf.copy_(b)

    def seen(self, part: Tensor) -> Tensor:
        """The block's part of a flat vector, in the shape of its leaf."""
        return part.view(self.shape) if self.factor is None else part.view(self.sent).movedim(-1, self.axis)

    def collect(self, g: Tensor | None) -> Tensor:
        """The block's part of P ∇f, flat."""
        if g is None:
            if self.layers and self.leaf.numel():
                raise SpecError(
                    f"{self.choice.name!r} is not used through its own layer in the forward pass; name it in `whole`"
                )
            return self.leaf.new_zeros(self.leaf.numel() if self.factor is None else _count(self.sent))
        if self.factor is None:
            return g.reshape(-1)
        inside = g if self.layers or self.start is None else lower(self.factor, g.to(self.start.dtype), self.axis)
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
    return factor.down(last.reshape(1, -1, last.shape[-1])).view(*last.shape[:-1], factor.rank).movedim(-1, axis)


def lift(factor: Factor, b: Tensor, axis: int = 1) -> Tensor:
    """Pᵀ on the input side: (out, r, …) → (out, in, …)."""
    last = b.movedim(axis, -1)
    up = factor.up(last.reshape(1, -1, factor.rank))
    return up.view(*last.shape[:-1], up.shape[-1]).movedim(-1, axis)


def _count(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _listed(types: set[torch.dtype]) -> str:
    return ", ".join(sorted(str(kind).removeprefix("torch.") for kind in types))
