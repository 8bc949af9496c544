"""Layers whose weight is W + B P with B the only trained tensor.

The forward pass uses the merged weight, so forward and input gradient cost what they always do. What shrinks is the
weight's gradient: the layer keeps the projected input (r wide) and forms only the r-wide gradient of B.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from fedspan.core.projector import Factor, picked
from fedspan.nn.recompute import remember

Narrow = Callable[[Tensor], Tensor]
LARGE = 1 << 16  # numbers of an input from which it matters what is kept of it
DONE = "fedspan_signs"  # in the metadata of a ReLU's gradient


class _Linear(torch.autograd.Function):
    """y = x Wᵀ + b;  ∂B = δᵀ (x Pᵀ)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, _b: Tensor, narrow: Narrow
    ) -> Tensor:
        ctx.save_for_backward(narrow(x), weight)
        ctx.has_bias = bias is not None
        y = F.linear(x, weight, bias)
        return (
            torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y
        )  # what follows may change it in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (delta,), (inside, weight) = grads, ctx.saved_tensors
        rows = delta.reshape(-1, delta.shape[-1])
        down = delta @ weight if ctx.needs_input_grad[0] else None
        inner = (inside.mT @ rows).mT  # δᵀ(x Pᵀ), in the order that is faster for small r
        return down, None, rows.sum(0) if ctx.has_bias else None, inner, None


class _Conv(torch.autograd.Function):
    """The same for a convolution; P acts on the input channels (of each group)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        b: Tensor,
        narrow: Narrow,
        how: tuple[Any, ...],
    ) -> Tensor:
        ctx.save_for_backward(narrow(x), weight)
        ctx.how, ctx.has_bias, ctx.shape, ctx.inner = how, bias is not None, x.shape, b.shape
        run = F.conv2d if x.dim() == 4 else F.conv1d
        return run(x, weight, bias, *how)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (delta,), (inside, weight) = grads, ctx.saved_tensors
        (*how, groups), down = ctx.how, None
        if ctx.needs_input_grad[0]:  # as a transposed convolution, which does not ask for the input
            sizes = zip(ctx.shape[2:], delta.shape[2:], weight.shape[2:], *how, strict=True)
            more = [n - ((m - 1) * s - 2 * p + d * (k - 1) + 1) for n, m, k, s, p, d in sizes]
            down = torch.ops.aten.convolution(delta, weight, None, *how, True, more, groups)
        shape, none = delta.new_empty(1).expand(ctx.inner), [0] * len(how[0])
        inner = torch.ops.aten.convolution_backward(
            delta, inside, shape, None, *how, False, none, groups, [False, True, False]
        )[1]
        over = [0, *range(2, delta.dim())]
        return down, None, delta.sum(over) if ctx.has_bias else None, inner, None, None


class _Embedding(torch.autograd.Function):
    """y = W[i];  ∂B[i] += δ Pᵀ."""

    @staticmethod
    def forward(
        ctx: Any, index: Tensor, weight: Tensor, b: Tensor, factor: Factor, skip: int | None
    ) -> Tensor:
        ctx.save_for_backward(index)
        ctx.factor, ctx.shape, ctx.skip = factor, b.shape, skip
        return F.embedding(index, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (delta,), (index,) = grads, ctx.saved_tensors
        inside = _down(ctx.factor, delta)
        sums = torch.promote_types(
            delta.dtype, torch.float32
        )  # a frequent token's many small terms would be lost
        out = torch.zeros(ctx.shape, dtype=sums, device=delta.device).index_add_(
            0, index.reshape(-1), inside.to(sums)
        )
        if ctx.skip is not None:
            out[ctx.skip] = 0
        return None, None, out.to(delta.dtype), None, None


def _down(factor: Factor, x: Tensor) -> Tensor:
    """x Pᵀ as one matrix in the type of x; P is kept in float32 where x is shorter."""
    rows = x.reshape(1, -1, x.shape[-1])
    if x.dtype == torch.bfloat16 and picked(factor) is None:  # picking is a gather, in any type
        return factor.down(rows.float())[0].to(x.dtype)
    return factor.down(rows)[0]


def is_transposed(layer: nn.Module) -> bool:
    """Whether a layer is the `Conv1D` of transformers: a Linear whose weight is (inputs, outputs)."""
    kind = type(layer)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def _inputs(factor: Factor) -> Narrow:
    """P on the last axis: (…, d) → (n, r)."""
    index = picked(factor)
    if index is None:
        return lambda x: _down(factor, x)
    one = index.flatten()
    return lambda x: x.reshape(-1, x.shape[-1]).index_select(1, one)


def channels(factor: Factor, groups: int) -> Narrow:
    """P on the channels of each group: (n, g·c, …) → (n, g·r, …)."""
    index = picked(factor)
    if index is not None and groups == 1:
        one = index.flatten()
        return lambda x: x.index_select(1, one)

    def narrow(x: Tensor) -> Tensor:
        n, _, *space = x.shape
        apart = x.reshape(n * groups, -1, *space)
        if index is not None:
            taken = apart.index_select(1, index.flatten())
        else:
            taken = torch.einsum("nc...,cr->nr...", apart, factor.columns()[0].to(x.dtype))
        return taken.reshape(n, groups * factor.rank, *space)

    return narrow


def signs(y: Tensor) -> Tensor:
    """Lets the ReLU that made y keep one byte per number: its gradient asks for the sign of its output alone.

    A convolution inside a subspace does not keep its input, so that the ReLU before it would be the only one to. Gives
    y. Before a Linear layer, whose step takes less time, it would cost 2 % of it.
    """
    made: Any = y.grad_fn
    if y.numel() < LARGE or made is None or made.name() != "ReluBackward0" or DONE in made.metadata:
        return y
    made.metadata[DONE], dtype = True, y.dtype
    with contextlib.suppress(
        RuntimeError
    ):  # somebody else decides what is kept, such as gradient checkpointing
        made._raw_saved_result.register_hooks(
            lambda kept: kept.bool(), lambda on: on.view(torch.uint8).to(dtype)
        )  # from a bool the same takes eight times as long
    return y


def restricted_forward(
    layer: nn.Module, b: Tensor, factor: Factor, recompute: bool = False
) -> Callable[[Tensor], Tensor]:
    """A forward for `layer` through which gradients reach B instead of its weight.

    With `recompute` a Linear notes how its output was computed, for `nn.recompute`.
    """
    own: Any = layer
    inputs = _inputs(factor)
    linear, convolution, embedding = (
        cast(Any, kind).apply for kind in (_Linear, _Conv, _Embedding)
    )
    if is_transposed(layer):
        return lambda x: linear(x, own.weight.detach().mT, own.bias, b.mT, inputs)
    if isinstance(layer, nn.Linear):

        def product(x: Tensor) -> Tensor:
            y: Tensor = linear(x, layer.weight.detach(), layer.bias, b, inputs)
            return remember(y, x, layer.weight, layer.bias) if recompute else y

        return product
    if isinstance(layer, nn.Embedding):
        if layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse:
            raise NotImplementedError(
                "Embedding with max_norm, scale_grad_by_freq or sparse gradients"
            )
        return lambda i: embedding(i, layer.weight.detach(), b, factor, layer.padding_idx)
    simple = own.padding_mode == "zeros" and not isinstance(own.padding, str)
    padding = own.padding if simple else (0,) * len(own.stride)
    how = (own.stride, padding, own.dilation, own.groups)
    mode = "constant" if own.padding_mode == "zeros" else own.padding_mode
    narrow = channels(factor, own.groups)

    def convolved(x: Tensor) -> Tensor:
        x = signs(x)
        if not simple:
            x = F.pad(x, own._reversed_padding_repeated_twice, mode=mode)
        y: Tensor = convolution(x, own.weight.detach(), own.bias, b, narrow, how)
        return y

    return convolved
