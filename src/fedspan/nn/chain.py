"""Gradients of a whole cohort for chains of plain layers with a known loss, without autograd.

A chain is an `nn.Sequential` of Linear, Conv2d, ReLU, MaxPool2d and Flatten. Every client has weights of its own:
forward and backward passes are written by hand, products are batched over the clients, and no graph is recorded. The
formulas are those of autograd; numbers agree to rounding. Convolutions and pooling take one client at a time, which
keeps its activations in the cache, in channels-last order, in which pooling is several times as fast.

The loss is a function of (model, batch) of the user's own. `loss_gradient` calls it with symbols instead of tensors: if
all that it does is to apply the model to the inputs and `cross_entropy`, `mse_loss` or
`binary_cross_entropy_with_logits` to the outputs and targets, its gradient is known. Anything else is left to autograd.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from fedspan.core.layout import Layout, Vector
from fedspan.core.projector import Factor, LinearMap
from fedspan.nn.layers import channels
from fedspan.nn.module import lift

FEW_CHANNELS = 4  # up to which unfolding the first layer's input is faster than torch's convolution
LOSSES = (F.cross_entropy, F.mse_loss, F.binary_cross_entropy_with_logits)


@dataclass(frozen=True, eq=False)
class Weight:
    """One block of the clients' weights, client first, and what becomes of its gradient.

    The gradient is written to `grad`. Where there is none, the block takes a step of length `lr` along it at once,
    which saves a pass over memory.
    """

    at: Tensor
    grad: Tensor | None
    lr: float
    start: Tensor | None  # inside a subspace: x, to which `at` is added
    factor: Factor | None  # inside a subspace: P of the block; `at` has the projected axis last

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


class Layer:
    """One step of a chain. Tensors are (clients, examples, …)."""

    first = False  # whether nothing before it is trained, so that no gradient is passed on
    alone = False  # whether it takes one client at a time
    dims: int | None = None  # axes of an example that it takes; None: any number
    prefix: str | None = None  # of its parameters' names; None: it has none
    w: Weight
    b: Weight | None

    def bind(self, weights: dict[str, Weight]) -> None:
        """Takes the weights of the point from which the next gradient is computed."""
        self.w, self.b = weights[f"{self.prefix}weight"], weights.get(f"{self.prefix}bias")

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
        kept = [name for name, one in vars(self).items() if isinstance(one, Tensor | Weight)]
        for name in kept:
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
        sizes = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
        self.how = (*((n, n) if isinstance(n, int) else n for n in sizes), layer.ceil_mode)

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

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

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
        back = d
        if not self.first and self.full is not None:
            back = torch.bmm(d, self.full)
        elif not self.first:
            assert self.w.start is not None
            assert self.w.factor is not None
            outside = self.w.factor.up(torch.bmm(d, self.w.at).flatten(0, 1).unsqueeze(0))
            back = outside[0].addmm_(d.flatten(0, 1), self.w.start).view(*d.shape[:2], -1)
        self.w.take_product(d.mT, self.h)
        if self.b is not None:
            self.b.take(d.sum(1))
        return back


class Conv(Layer):
    """A convolution with one client's weights."""

    alone, dims = True, 3
    columns: Tensor | None = None  # the input's windows, if the convolution is a product

    def __init__(self, prefix: str, layer: nn.Conv2d) -> None:
        self.prefix, self.size = prefix, layer.kernel_size
        self.padding = cast(tuple[int, int], layer.padding)
        self.how = (layer.stride, self.padding, layer.dilation, layer.groups)
        self.few = layer.in_channels <= FEW_CHANNELS and layer.groups == 1

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
        if not self._unfolds:
            self.h, self.columns = h[0], None
            return F.conv2d(self.h, self.full, bias, *self.how).unsqueeze(0)
        # One product with the windows of an input that is padded already.
        x, (stride, _, dilation, _) = h[0], self.how
        n, c, *space = x.shape
        spans = zip(space, dilation, self.size, stride, strict=True)
        rows, cols = ((m - d * (k - 1) - 1) // step + 1 for m, d, k, step in spans)
        example, channel, row, col = x.stride()
        by_window = (channel, row * dilation[0], col * dilation[1])
        by_place = (example, row * stride[0], col * stride[1])
        windows = x.as_strided(
            (c, *self.size, n, rows, cols), by_window + by_place, x.storage_offset()
        )
        columns = self.columns = windows.reshape(c * self.size[0] * self.size[1], -1)
        kernel = self.full.flatten(1).mT
        out = columns.mT @ kernel if bias is None else torch.addmm(bias, columns.mT, kernel)
        return out.view(n, rows, cols, -1).permute(0, 3, 1, 2).unsqueeze(0)

    def backward(self, d: Tensor) -> Tensor:
        delta = d[0].contiguous(memory_format=torch.channels_last)
        if self.b is not None:
            self.b.take(delta.sum((0, 2, 3)).unsqueeze(0))
        if self.columns is not None:
            product = self.columns @ delta.permute(0, 2, 3, 1).flatten(0, 2)
            self.w.take(product.mT.reshape(self.w.at.shape))
            return d
        down = None
        if self.w.factor is None:
            down, weight, _ = self._back(delta, self.h, self.full, [not self.first, True, False])
            self.w.take(weight.unsqueeze(0))
        else:
            if not self.first:
                down = self._back(delta, self.h, self.full, [True, False, False])[0]
            narrow = channels(self.w.factor, self.how[3])(self.h)
            shape = delta.new_empty(1).expand(self.w.at[0].movedim(-1, 1).shape)
            inner = self._back(delta, narrow, shape, [False, True, False])[1]
            self.w.take(inner.movedim(1, -1).unsqueeze(0))
        return d if down is None else down.unsqueeze(0)

    def _back(self, delta: Tensor, h: Tensor, weight: Tensor, which: list[bool]) -> Any:
        *how, groups = self.how
        return torch.ops.aten.convolution_backward(
            delta, h, weight, None, *how, False, [0, 0], groups, which
        )


@dataclass(frozen=True)
class LossGradient:
    """The gradient of a mean loss by the outputs, for a whole cohort."""

    loss: Callable[..., Tensor]  # one of `LOSSES`
    ignore_index: int = -100
    label_smoothing: float = 0.0

    def fits(self, targets: Tensor, width: int) -> bool:
        """Whether the formula holds for targets (clients, examples, …) of outputs `width` wide."""
        if self.loss is F.cross_entropy:
            return targets.dtype == torch.int64 and targets.dim() == 2 and not self.label_smoothing
        return targets.dim() == 3 and targets.shape[2] == width

    def ready(self, targets: Tensor, batch: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """What the gradients of a round's batches need of its targets."""
        if self.loss is not F.cross_entropy:
            return (targets,)
        counted = targets != self.ignore_index
        sums = counted.unflatten(1, (-1, batch)).sum(-1).to(dtype)
        share = counted / sums.repeat_interleave(batch, 1)
        places = targets.where(counted, 0).unsqueeze(-1)
        return places, share.nan_to_num_().unsqueeze(-1), torch.full(places.shape, -1, dtype=dtype)

    def __call__(self, outputs: Tensor, targets: Tensor, *more: Tensor) -> Tensor:
        if self.loss is F.cross_entropy:  # (softmax − one-hot) / examples that count
            share, less = more
            return outputs.softmax(-1).scatter_add_(-1, targets, less).mul_(share)
        if self.loss is F.mse_loss:
            return (outputs - targets).mul_(2 / outputs[0].numel())
        return outputs.sigmoid().sub_(targets).mul_(1 / outputs[0].numel())


class _Symbol:
    """Stands for a tensor; functions of torch that are given one arrive here."""

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function not in LOSSES:
            raise NotImplementedError
        bound = inspect.signature(function).bind(*args, **(kwargs or {}))
        bound.apply_defaults()
        return function, bound.arguments


def loss_gradient(loss: Callable[[Any, Any], Any]) -> LossGradient | None:
    """The gradient of a loss that is known; None for any other."""
    inputs, outputs, targets = _Symbol(), _Symbol(), _Symbol()

    def model(x: Any) -> _Symbol:
        if x is not inputs:
            raise NotImplementedError
        return outputs

    try:
        function, given = loss(model, (inputs, targets))
    except Exception:  # whatever a function raises that needs a tensor
        return None
    if given.pop("input") is not outputs or given.pop("target") is not targets:
        return None
    if given.pop("reduction") != "mean":
        return None
    ours = {name: given.pop(name) for name in ("ignore_index", "label_smoothing") if name in given}
    if any(one is not None for one in given.values()):  # such as weights of classes
        return None
    return LossGradient(function, **ours)


@dataclass(frozen=True, eq=False)
class Chain:
    """The layers of a network in order, and what its outputs are compared by."""

    before: Sequence[Layer]
    first: Layer  # that is trained
    after: Sequence[Layer]
    loss: LossGradient


class ChainRun:
    """Gradients and steps of a cohort along one direction of a round, in full or inside x + range(Pᵀ)."""

    def __init__(
        self, chain: Chain, layout: Layout, clients: int, x: Vector | None, P: LinearMap | None
    ) -> None:
        self.chain, blocks = chain, layout.blocks
        self.layers = (*chain.before, chain.first, *chain.after)
        self.trained = [layer for layer in self.layers if layer.prefix is not None]
        size = 1 if any(layer.alone for layer in self.layers) else clients
        self.shares = [slice(i, i + size) for i in range(0, clients, size)]
        self.names, full = [block.name for block in blocks], [block.size for block in blocks]
        self.sizes: list[int] = full if P is None else list(P.sizes)
        self.factors = (None,) * len(blocks) if P is None else P.factors
        self.shapes = [  # of the blocks of a point; a projected axis is the last
            b.shape if factor is None else (b.shape[0], *b.shape[2:], factor.rank)
            for b, factor in zip(blocks, self.factors, strict=True)
        ]
        self.starts: list[Tensor | None] = [None] * len(blocks)
        if x is not None:
            parts = zip(x.view(-1).split(full), blocks, strict=True)
            self.starts = [part.view(b.shape) for part, b in parts]
        self._parts: tuple[Tensor, ...] | None = None

    def split(self, v: Vector) -> list[Tensor]:
        """Views (clients, *shape) of a vector (1, clients, size)."""
        parts = zip(v[0].split(self.sizes, 1), self.shapes, strict=True)
        return [part.unflatten(1, shape) for part, shape in parts]

    def bind(self, at: list[Tensor], grads: list[Tensor] | None, lr: float = 0.0) -> None:
        """Sets the point, as blocks (clients, *shape), and where its gradients go."""
        self.weights = []
        for share in self.shares:
            outs = [None] * len(at) if grads is None else [grad[share] for grad in grads]
            parts = zip(self.names, at, outs, self.starts, self.factors, strict=True)
            self.weights.append(
                {name: Weight(a[share], g, lr, x, factor) for name, a, g, x, factor in parts}
            )

    def __call__(self, parts: tuple[Tensor, ...], place: slice) -> None:
        """The gradients on the batch in `place` of the gathered examples (clients, examples, …)."""
        chain, fresh = self.chain, parts is not self._parts
        if fresh:
            self._parts, self._seen = parts, list[tuple[Tensor, ...]]()
            batch = len(range(*place.indices(parts[0].shape[1])))
            self._targets = chain.loss.ready(parts[1], batch, parts[0].dtype)
        for number, (share, weights) in enumerate(zip(self.shares, self.weights, strict=True)):
            for layer in self.trained:
                layer.bind(weights)
            if fresh:
                h = parts[0][share]
                for layer in chain.before:
                    h = layer.forward(h)
                self._seen.append(chain.first.seen(h))
            h = chain.first.forward(*(part[:, place] for part in self._seen[number]))
            for layer in chain.after:
                h = layer.forward(*layer.seen(h))
            d = chain.loss(h, *(part[share, place] for part in self._targets))
            for layer in reversed(chain.after):
                d = layer.backward(d)
            chain.first.backward(d)

    def release(self) -> None:
        """Drops the point, whose memory the work after the steps can use. What was seen of the inputs stays."""
        self.weights = []
        for layer in self.layers:
            layer.release()


def chain_of(
    model: nn.Module,
    layout: Layout,
    loss: Callable[[Any, Any], Any],
    inputs: Tensor,
    targets: Tensor,
) -> Chain | None:
    """The model and its loss as a chain, for such examples.

    None where it has other layers, frozen or shared weights, or hooks, where its outputs are not rows, or where the
    gradient of the loss is not known.
    """
    layers: list[Layer] = []
    names: list[str] = []
    width, dims, known = 0, inputs.dim() - 1, loss_gradient(loss)
    if known is None or any(_changed(module) for module in model.modules()):
        return None
    for prefix, module in _modules(model, ""):
        layer = _layer(prefix, module)
        if layer is None or layer.dims not in (dims, None):
            return None
        if isinstance(layer, Flatten):
            dims = 1
        if isinstance(layer, MaxPool) and layers and isinstance(layers[-1], ReLU):
            layers.insert(-1, layer)  # the same numbers, and ReLU has fewer to look at
        else:
            layers.append(layer)
        names += [prefix + key for key, _ in module.named_parameters()]
        width = module.out_features if isinstance(module, nn.Linear) else width
    alike = sorted(names) == sorted(block.name for block in layout.blocks)
    if dims != 1 or not width or not alike or not known.fits(targets.unsqueeze(0), width):
        return None
    trained = next(i for i, layer in enumerate(layers) if layer.prefix is not None)
    for layer in layers[: trained + 1]:
        layer.first = True
    return Chain(layers[:trained], layers[trained], layers[trained + 1 :], known)


def _modules(model: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The layers of nested Sequentials, in order, with what their parameters' names begin with."""
    if type(model) is not nn.Sequential:
        yield prefix, model
        return
    # `named_children` leaves out a layer that is used again
    for key, child in model._modules.items():
        assert child is not None
        yield from _modules(child, f"{prefix}{key}.")


def _changed(module: nn.Module) -> bool:
    """Whether a module does more than its class says."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return (
        any(getattr(module, name) for name in hooks)
        or "forward" in vars(module)
        or any(p._backward_hooks for p in module.parameters())
    )


def _layer(prefix: str, module: nn.Module) -> Layer | None:
    if type(module) is nn.Linear:
        return Linear(prefix)
    if type(module) is nn.Conv2d:
        plain = module.padding_mode == "zeros" and not isinstance(module.padding, str)
        return Conv(prefix, module) if plain else None
    if type(module) is nn.MaxPool2d and not module.return_indices:
        return MaxPool(module)
    if type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
        return Flatten()
    return ReLU() if type(module) is nn.ReLU else None
