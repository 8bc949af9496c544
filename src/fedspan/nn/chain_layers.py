"""Plain layers with weights of their own for every client: forward and backward written by hand.

The formulas are those of autograd; numbers agree to rounding. Convolutions and pooling take one client at a time, which
keeps its activations in the cache, in channels-last order, in which pooling is several times as fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from fedspan.core.layout import Block, Layout, Vector
from fedspan.core.linear_map import Factor, LinearMap
from fedspan.nn.layers import channels
from fedspan.nn.module import lift

Tensor = torch.Tensor
FEW_CHANNELS = 4  # up to which unfolding the first layer's input is faster than torch's convolution


@dataclass(frozen=True, eq=False)
class Weight:
    """One block of the clients' weights, client first, and what becomes of its gradient.

    The gradient is written to `grad`. Where there is none, the block takes a step of length `lr` along it at once,
    which saves a pass over memory.
    """

    at: Tensor
    grad: Tensor | None
    lr: float = 0.0
    start: Tensor | None = None  # inside a subspace: x, to which `at` is added
    factor: Factor | None = (
        None  # inside a subspace: P of the block; `at` has the projected axis last
    )

    def value(self) -> Tensor:
        """The weights themselves. With a factor there must be one client."""
        if self.start is None:
            return self.at
        if self.factor is None:
            return self.start + self.at
        return (self.start + lift(self.factor, self.at[0].movedim(-1, 1))).unsqueeze(0)

    def take(self, gradient: Tensor) -> None:
        """Takes the gradient."""
        if self.grad is not None:
            self.grad.copy_(gradient)
        else:
            self.at.sub_(gradient, alpha=self.lr)

    def take_product(self, a: Tensor, b: Tensor) -> None:
        """Takes the gradient a b, matrices per client."""
        if self.grad is not None:
            torch.bmm(a, b, out=self.grad)
        else:
            self.at.baddbmm_(a, b, alpha=-self.lr)


Weights = dict[str, Weight]


class Blocks:
    """The blocks of a point, in full or inside x + range(Pᵀ)."""

    def __init__(self, layout: Layout, x: Vector | None = None, P: LinearMap | None = None) -> None:
        blocks = layout.blocks
        full = [block.size for block in blocks]
        self.names, self.sizes = (
            [block.name for block in blocks],
            full if P is None else list(P.sizes),
        )
        self.factors = (None,) * len(blocks) if P is None else P.factors
        self.shapes = [_shape(*each) for each in zip(blocks, self.factors, strict=True)]
        parts = [None] * len(blocks) if x is None else x.view(-1).split(full)
        self.starts = [
            part if part is None else part.view(b.shape)
            for part, b in zip(parts, blocks, strict=True)
        ]

    def split(self, v: Vector) -> list[Tensor]:
        """Views (clients, *shape) of a vector (1, clients, size)."""
        parts = zip(v[0].split(self.sizes, 1), self.shapes, strict=True)
        return [part.unflatten(1, shape) for part, shape in parts]

    def weights(
        self, at: list[Tensor], grads: list[Tensor] | None, lr: float, clients: slice
    ) -> Weights:
        """The weights of some clients."""
        outs = [None] * len(at) if grads is None else [grad[clients] for grad in grads]
        parts = zip(self.names, at, outs, self.starts, self.factors, strict=True)
        return {
            name: Weight(a[clients], out, lr, start, factor)
            for name, a, out, start, factor in parts
        }


def _shape(block: Block, factor: Factor | None) -> tuple[int, ...]:
    """The shape of a block in a point; inside a subspace the projected axis is the last."""
    return block.shape if factor is None else (block.shape[0], *block.shape[2:], factor.rank)


class Layer:
    """One step of a chain. Tensors are (clients, examples, …)."""

    first = False  # whether nothing before it is trained, so that no gradient is passed on
    alone = False  # whether it takes one client at a time
    dims: int | None = None  # axes of an example that it takes; None: any number

    def bind(self, weights: Weights) -> None:
        """Takes the weights of the point from which the next gradient is computed."""

    def seen(self, h: Tensor) -> tuple[Tensor, ...]:
        """What depends on the input and not on the point, so that the first layer forms it once per round."""
        return (h,)

    def forward(self, h: Tensor, *more: Tensor) -> Tensor:
        """The output, from what was `seen`."""
        raise NotImplementedError

    def backward(self, d: Tensor) -> Tensor:
        """Writes the gradients of the weights; returns that of the input."""
        raise NotImplementedError

    def release(self) -> None:
        """Drops what it keeps of the last pass."""
        for name in [
            name for name, kept in vars(self).items() if isinstance(kept, Tensor | Weight)
        ]:
            delattr(self, name)


class Flatten(Layer):
    """Each example as one row."""

    def forward(self, h: Tensor, *more: Tensor) -> Tensor:
        self.shape = h.shape
        return h.flatten(2)

    def backward(self, d: Tensor) -> Tensor:
        return d.view(self.shape)


class ReLU(Layer):
    """max(h, 0), in place: no layer before it keeps its own output."""

    def forward(self, h: Tensor, *more: Tensor) -> Tensor:
        self.out = h.relu() if self.first else h.relu_()
        return self.out

    def backward(self, d: Tensor) -> Tensor:
        return torch.ops.aten.threshold_backward(d, self.out, 0)  # type: ignore[no-any-return]


class MaxPool(Layer):
    """The largest number of each window."""

    alone, dims = True, 3

    def __init__(self, layer: nn.MaxPool2d) -> None:
        pairs = [_pair(n) for n in (layer.kernel_size, layer.stride, layer.padding, layer.dilation)]
        self.how = (*pairs, layer.ceil_mode)

    def forward(self, h: Tensor, *more: Tensor) -> Tensor:
        self.h = h[0]
        out, self.index = torch.ops.aten.max_pool2d_with_indices(self.h, *self.how)
        return out.unsqueeze(0)  # type: ignore[no-any-return]

    def backward(self, d: Tensor) -> Tensor:
        delta = d[0].contiguous(memory_format=torch.channels_last)
        back = torch.ops.aten.max_pool2d_with_indices_backward(delta, self.h, *self.how, self.index)
        return back.unsqueeze(0)  # type: ignore[no-any-return]


class Linear(Layer):
    """h Wᵀ + b. Inside a subspace W = W₀ + Z P: h W₀ᵀ is one product for all clients, and (h Pᵀ) Zᵀ a small one."""

    dims = 1

    def __init__(self, prefix: str, bias: bool) -> None:
        self.names = f"{prefix}weight", f"{prefix}bias" if bias else None

    def bind(self, weights: Weights) -> None:
        self.w, self.b = weights[self.names[0]], weights[self.names[1]] if self.names[1] else None

    def seen(self, h: Tensor) -> tuple[Tensor, ...]:
        if self.w.factor is None:
            return (h,)
        assert self.w.start is not None
        rows = h.reshape(1, -1, h.shape[-1])
        base = rows[0] @ self.w.start.mT
        return tuple(part.view(*h.shape[:2], -1) for part in (self.w.factor.down(rows), base))

    def forward(self, h: Tensor, *more: Tensor) -> Tensor:
        self.h = h  # h Pᵀ inside a subspace
        self.full = self.w.value() if self.w.factor is None else None
        b = None if self.b is None else self.b.value().unsqueeze(1)
        if self.full is not None:
            return torch.bmm(h, self.full.mT) if b is None else torch.baddbmm(b, h, self.full.mT)
        out = torch.baddbmm(more[0], h, self.w.at.mT)
        return out if b is None else out.add_(b)

    def backward(self, d: Tensor) -> Tensor:
        back = d if self.first else self._back(d)
        self.w.take_product(d.mT, self.h)
        if self.b is not None:
            self.b.take(d.sum(1))
        return back

    def _back(self, d: Tensor) -> Tensor:
        if self.full is not None:
            return torch.bmm(d, self.full)
        assert self.w.start is not None
        assert self.w.factor is not None
        outside = self.w.factor.up(torch.bmm(d, self.w.at).flatten(0, 1).unsqueeze(0))
        return outside[0].addmm_(d.flatten(0, 1), self.w.start).view(*d.shape[:2], -1)


class Conv(Layer):
    """A convolution with one client's weights."""

    alone, dims = True, 3
    columns: Tensor | None = (
        None  # the input's windows, where the convolution is one product with them
    )

    def __init__(self, prefix: str, layer: nn.Conv2d) -> None:
        self.names = f"{prefix}weight", f"{prefix}bias" if layer.bias is not None else None
        self.stride, self.dilation, self.groups = layer.stride, layer.dilation, layer.groups
        self.padding = cast(tuple[int, int], layer.padding)
        self.size, self.few = (
            layer.kernel_size,
            layer.in_channels <= FEW_CHANNELS and layer.groups == 1,
        )

    def bind(self, weights: Weights) -> None:
        self.w, self.b = weights[self.names[0]], weights[self.names[1]] if self.names[1] else None

    @property
    def _unfolds(self) -> bool:
        return self.first and self.few and self.w.factor is None

    def seen(self, h: Tensor) -> tuple[Tensor, ...]:
        if self._unfolds:
            top, left = self.padding
            return (F.pad(h[0], (left, left, top, top)).unsqueeze(0),)
        return (h[0].contiguous(memory_format=torch.channels_last).unsqueeze(0),)

    def forward(self, h: Tensor, *more: Tensor) -> Tensor:
        self.full, bias = self.w.value()[0], None if self.b is None else self.b.value()[0]
        if self._unfolds:
            return self._unfolded(h[0], bias).unsqueeze(0)
        self.h, self.columns = h[0], None
        how = (self.stride, self.padding, self.dilation, self.groups)
        return F.conv2d(self.h, self.full, bias, *how).unsqueeze(0)

    def _unfolded(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The same as one product with the windows of an input that is padded already."""
        n, c, height, width = x.shape
        spans = [d * (k - 1) + 1 for d, k in zip(self.dilation, self.size, strict=True)]
        rows, cols = (
            (m - s) // step + 1
            for m, s, step in zip((height, width), spans, self.stride, strict=True)
        )
        example, channel, row, col = x.stride()
        by_window = (channel, row * self.dilation[0], col * self.dilation[1])
        by_place = (example, row * self.stride[0], col * self.stride[1])
        windows = x.as_strided(
            (c, *self.size, n, rows, cols), by_window + by_place, x.storage_offset()
        )
        columns = self.columns = windows.reshape(c * self.size[0] * self.size[1], -1)
        kernel = self.full.flatten(1).mT
        out = columns.mT @ kernel if bias is None else torch.addmm(bias, columns.mT, kernel)
        return out.view(n, rows, cols, -1).permute(0, 3, 1, 2)

    def backward(self, d: Tensor) -> Tensor:
        delta = d[0].contiguous(memory_format=torch.channels_last)
        if self.b is not None:
            self.b.take(delta.sum((0, 2, 3)).unsqueeze(0))
        if self.columns is not None:
            product = self.columns @ delta.permute(0, 2, 3, 1).flatten(0, 2)
            self.w.take(product.mT.reshape(self.w.at.shape))
            return d
        if self.w.factor is None:
            down, weight, _ = self._back(delta, self.h, self.full, [not self.first, True, False])
            self.w.take(weight.unsqueeze(0))
        else:
            down = (
                None
                if self.first
                else self._back(delta, self.h, self.full, [True, False, False])[0]
            )
            narrow = channels(self.w.factor, self.groups)(self.h)
            shape = self.w.at[0].movedim(-1, 1).shape
            inner = self._back(
                delta, narrow, delta.new_empty(1).expand(shape), [False, True, False]
            )[1]
            self.w.take(inner.movedim(1, -1).unsqueeze(0))
        return d if down is None else down.unsqueeze(0)

    def _back(self, delta: Tensor, h: Tensor, weight: Tensor, which: list[bool]) -> Any:
        how = (self.stride, self.padding, self.dilation, False, [0, 0], self.groups)
        return torch.ops.aten.convolution_backward(delta, h, weight, None, *how, which)


def _pair(n: int | tuple[int, int]) -> tuple[int, int]:
    return (n, n) if isinstance(n, int) else n
