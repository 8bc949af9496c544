"""Layers whose weight is W + B P with B the only trained tensor.

The forward pass uses the merged weight, so forward and input gradient cost what they always do. What shrinks is the
weight's gradient: the layer keeps the projected input (r wide) and forms only the r-wide gradient of B.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.grad import conv1d_weight, conv2d_weight

from fedspan.core.projector import Factor

USUAL = {
    "padding_mode": "zeros", "max_norm": None, "scale_grad_by_freq": False, "sparse": False,
}  # fmt: skip


class _Linear(torch.autograd.Function):
    """y = x Wᵀ + b;  ∂B = δᵀ (x Pᵀ)."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        x, weight, bias, _, factor = given
        ctx.save_for_backward(_down(factor, x), weight)
        y = F.linear(x, weight, bias)
        # what follows may change it in place
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (delta,), (inside, weight), needed = grads, ctx.saved_tensors, ctx.needs_input_grad
        rows = delta.reshape(-1, delta.shape[-1])
        inner = (inside.mT @ rows).mT  # δᵀ(x Pᵀ), in the order that is faster for small r
        down = delta @ weight if needed[0] else None
        return down, None, rows.sum(0) if needed[2] else None, inner, None


class _Conv(torch.autograd.Function):
    """The same for a convolution; P acts on the input channels (of each group)."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        x, weight, bias, b, factor, ctx.how = given
        ctx.save_for_backward(channels(x, factor, ctx.how[3]), weight)
        ctx.shape, ctx.inner = x.shape, b.shape
        run = F.conv2d if x.dim() == 4 else F.conv1d
        return run(x, weight, bias, *ctx.how)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (delta,), (inside, weight), needed = grads, ctx.saved_tensors, ctx.needs_input_grad
        (*how, groups), down = ctx.how, None
        if needed[0]:  # as a transposed convolution, which does not ask for the input
            sizes = zip(ctx.shape[2:], delta.shape[2:], weight.shape[2:], *how, strict=True)
            more = [n - ((m - 1) * s - 2 * p + d * (k - 1) + 1) for n, m, k, s, p, d in sizes]
            down = torch.ops.aten.convolution(delta, weight, None, *how, True, more, groups)
        by_weight: Any = conv2d_weight if delta.dim() == 4 else conv1d_weight
        inner = by_weight(inside, ctx.inner, delta, *ctx.how)
        over = [0, *range(2, delta.dim())]
        return down, None, delta.sum(over) if needed[2] else None, inner, None, None


class _Embedding(torch.autograd.Function):
    """y = W[i];  ∂B[i] += δ Pᵀ."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        index, weight, b, ctx.factor, ctx.skip = given
        ctx.save_for_backward(index)
        ctx.shape = b.shape
        return F.embedding(index, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (delta,), (index,) = grads, ctx.saved_tensors
        # a frequent token's many small terms would be lost
        sums = torch.promote_types(delta.dtype, torch.float32)
        out = torch.zeros(ctx.shape, dtype=sums, device=delta.device)
        out.index_add_(0, index.reshape(-1), _down(ctx.factor, delta).to(sums))
        if ctx.skip is not None:
            out[ctx.skip] = 0
        return None, None, out.to(delta.dtype), None, None


def _down(factor: Factor, x: Tensor) -> Tensor:
    """x Pᵀ as one matrix in the type of x; P is kept in float32 where x is shorter."""
    rows = x.reshape(-1, x.shape[-1])
    if factor.index is not None:
        return rows.index_select(1, factor.index.flatten())
    if x.dtype == torch.bfloat16:
        rows = rows.float()
    return factor.down(rows.unsqueeze(0))[0].to(x.dtype)


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer has a weight whose gradient can be formed inside a subspace."""
    given = vars(layer)
    usual = all(given.get(name, value) == value for name, value in USUAL.items())
    known = type(layer) in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Embedding)
    return is_transposed(layer) or (known and usual and not isinstance(given.get("padding"), str))


def is_transposed(layer: nn.Module) -> bool:
    """Whether a layer is the `Conv1D` of transformers: a Linear whose weight is (inputs, outputs)."""
    kind = type(layer)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def channels(x: Tensor, factor: Factor, groups: int) -> Tensor:
    """x with P on the channels of each group: (n, g·c, …) → (n, g·r, …)."""
    n, _, *space = x.shape
    apart = x.reshape(n * groups, -1, *space)
    if factor.index is not None:
        taken = apart.index_select(1, factor.index.flatten())
    else:
        taken = torch.einsum("nc...,cr->nr...", apart, factor.columns()[0].to(x.dtype))
    return taken.reshape(n, groups * factor.rank, *space)


def restricted_forward(layer: nn.Module, b: Tensor, factor: Factor) -> Callable[[Tensor], Tensor]:
    """A forward for `layer` through which gradients reach B instead of its weight."""
    own: Any = layer
    linear: Any = _Linear.apply
    if is_transposed(layer):
        return lambda x: linear(x, own.weight.detach().mT, own.bias, b.mT, factor)
    if isinstance(layer, nn.Linear):
        return lambda x: linear(x, own.weight.detach(), own.bias, b, factor)
    if isinstance(layer, nn.Embedding):
        embedding: Any = _Embedding.apply
        return lambda i: embedding(i, own.weight.detach(), b, factor, own.padding_idx)
    how = (own.stride, own.padding, own.dilation, own.groups)
    convolution: Any = _Conv.apply
    return lambda x: convolution(x, own.weight.detach(), own.bias, b, factor, how)
