"""Gradients of a whole cohort for chains of plain layers with a known loss, without autograd.

A chain is an `nn.Sequential` of Linear, Conv2d, ReLU, MaxPool2d and Flatten. Every client has weights of its own:
forward and backward passes are written by hand, products are batched over the clients, and no graph is recorded. The
formulas are those of autograd; numbers agree to rounding. Convolutions and pooling take one client at a time, which
keeps its activations in the cache, in channels-last order, in which pooling is several times as fast.

The loss is a function of (model, batch) of the user's own. `known_loss` calls it with symbols instead of tensors: if
all that it does is to apply the model to the inputs and `cross_entropy`, `mse_loss` or
`binary_cross_entropy_with_logits` to the outputs and targets, its gradient is known. Anything else is left to autograd.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

from fedspan.core.layout import Layout, Vector
from fedspan.core.projector import Factor, LinearMap
from fedspan.nn.layers import channels
from fedspan.nn.module import lift

if TYPE_CHECKING:
    from fedspan.nn.objective import Finish

FEW_CHANNELS = 4  # up to which unfolding the first layer's input is faster than torch's convolution
LOSSES = (F.cross_entropy, F.mse_loss, F.binary_cross_entropy_with_logits)
KnownLoss = tuple[Callable[..., Tensor], int]  # one of LOSSES, and the class that does not count
Parts = tuple[Tensor, ...]  # (clients, examples, …) each


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
        at = self.at
        if self.factor is not None:
            at = lift(self.factor, at[0].movedim(-1, 1)).unsqueeze(0)
        return at if self.start is None else self.start + at

    def take(self, gradient: Tensor, more: Tensor | None = None) -> None:
        """Takes the gradient, or the product of two matrices per client as the gradient."""
        if more is not None and self.grad is not None:
            torch.bmm(gradient, more, out=self.grad)
        elif more is not None:
            self.at.baddbmm_(gradient, more, alpha=-self.lr)
        elif self.grad is not None:
            self.grad.copy_(gradient)
        else:
            self.at.sub_(gradient, alpha=self.lr)


class Layer:
    """One step of a chain. Tensors are (clients, examples, …)."""

    first = False  # whether nothing before it is trained, so that no gradient is passed on
    dims: int | None = None  # axes of an example; three: one client at a time; None: any number
    w: Weight  # of a layer that is trained
    b: Weight | None

    def __init__(self, layer: nn.Module) -> None:
        self.params = len([*layer.parameters()])

    def seen(self, h: Tensor) -> Parts:
        """What depends on the input and not on the point, so that the first layer forms it once per round."""
        return (h,)

    def forward(self, h: Tensor, *more: Tensor) -> Tensor:
        """The output, from what was `seen`."""
        raise NotImplementedError

    def backward(self, d: Tensor) -> Tensor:
        """Gives the gradients of the weights to them; returns that of the input."""
        raise NotImplementedError


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

    dims = 3

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
        self.how = [getattr(layer, name) for name in names]

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

    def seen(self, h: Tensor) -> Parts:
        if self.w.factor is None or self.w.start is None:
            return (h,)
        rows = h.reshape(1, -1, h.shape[-1])
        base = rows[0] @ self.w.start.mT
        return tuple(part.view(*h.shape[:2], -1) for part in (self.w.factor.down(rows), base))

    def forward(self, h: Tensor, *more: Tensor) -> Tensor:
        self.h = h  # h Pᵀ inside a subspace
        b = None if self.b is None else self.b.value().unsqueeze(1)
        if self.w.factor is None:
            self.full = self.w.value()
            return torch.bmm(h, self.full.mT) if b is None else torch.baddbmm(b, h, self.full.mT)
        out = torch.baddbmm(more[0], h, self.w.at.mT)
        return out if b is None else out.add_(b)

    def backward(self, d: Tensor) -> Tensor:
        back = d
        if self.first:
            pass
        elif self.w.factor is None or self.w.start is None:
            back = torch.bmm(d, self.full)
        else:
            outside = self.w.factor.up(torch.bmm(d, self.w.at).flatten(0, 1).unsqueeze(0))
            back = outside[0].addmm_(d.flatten(0, 1), self.w.start).view(*d.shape[:2], -1)
        self.w.take(d.mT, self.h)
        if self.b is not None:
            self.b.take(d.sum(1))
        return back


class Conv(Layer):
    """A convolution with one client's weights."""

    dims = 3

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        self.how = (layer.stride, layer.padding, layer.dilation, layer.groups)
        self.few = layer.in_channels <= FEW_CHANNELS and self.how[2:] == ((1, 1), 1)

    @property
    def _unfolds(self) -> bool:
        """Whether the convolution is one product with the windows of its input."""
        return self.first and self.few and self.w.factor is None

    def seen(self, h: Tensor) -> Parts:
        if self._unfolds:
            top, left = self.how[1]
            return (F.pad(h[0], (left, left, top, top)).unsqueeze(0),)
        return (h[0].contiguous(memory_format=torch.channels_last).unsqueeze(0),)

    def forward(self, h: Tensor, *more: Tensor) -> Tensor:
        self.h = h[0]
        self.full, bias = self.w.value()[0], None if self.b is None else self.b.value()[0]
        if not self._unfolds:
            return F.conv2d(self.h, self.full, bias, *self.how).unsqueeze(0)
        windows = self.h
        for axis, step in enumerate(self.how[0], 2):
            windows = windows.unfold(axis, self.full.shape[axis], step)
        n, _, rows, cols, *_ = windows.shape
        kernel = self.full.flatten(1).mT
        columns = self.h = windows.permute(1, 4, 5, 0, 2, 3).reshape(len(kernel), -1)
        out = columns.mT @ kernel if bias is None else torch.addmm(bias, columns.mT, kernel)
        return out.view(n, rows, cols, -1).permute(0, 3, 1, 2).unsqueeze(0)

    def backward(self, d: Tensor) -> Tensor:
        delta, factor = d[0].contiguous(memory_format=torch.channels_last), self.w.factor
        if self.b is not None:
            self.b.take(delta.sum((0, 2, 3)).unsqueeze(0))
        if self._unfolds:
            product = self.h @ delta.permute(0, 2, 3, 1).flatten(0, 2)
            self.w.take(product.mT.reshape(self.w.at.shape))
            return d
        down = d
        if not self.first:  # before a step changes the weights
            *how, groups = self.how
            down = torch.ops.aten.convolution_backward(
                delta, self.h, self.full, None, *how, False, [0, 0], groups, [True, False, False]
            )[0].unsqueeze(0)
        if factor is None:
            weight = conv2d_weight(self.h, self.full.shape, delta, *self.how)
        else:
            narrow, inner = channels(self.h, factor, self.how[3]), self.w.at[0].movedim(-1, 1)
            weight = conv2d_weight(narrow, inner.shape, delta, *self.how).movedim(1, -1)
        self.w.take(weight.unsqueeze(0))
        return down


def fits(loss: KnownLoss, targets: Tensor, width: int) -> bool:
    """Whether the gradient of a loss is known for targets (examples, …) of outputs `width` wide."""
    if loss[0] is F.cross_entropy:
        return targets.dtype == torch.int64 and targets.dim() == 1
    return targets.shape[1:] == (width,)


def of_targets(loss: KnownLoss, targets: Tensor, batch: int, dtype: torch.dtype) -> Parts:
    """What the gradients of a round's batches need of its targets (clients, examples, …)."""
    function, ignored = loss
    if function is not F.cross_entropy:
        return (targets,)
    counted = targets != ignored
    sums = counted.unflatten(1, (-1, batch)).sum(-1).to(dtype)
    share = counted / sums.repeat_interleave(batch, 1)
    places = targets.where(counted, 0).unsqueeze(-1)
    return places, share.nan_to_num_().unsqueeze(-1), torch.full(places.shape, -1, dtype=dtype)


def by_outputs(loss: KnownLoss, outputs: Tensor, targets: Tensor, *more: Tensor) -> Tensor:
    """The gradient of a mean loss by the outputs, for a whole cohort."""
    if loss[0] is F.cross_entropy:  # (softmax − one-hot) / examples that count
        share, less = more
        return outputs.softmax(-1).scatter_add_(-1, targets, less).mul_(share)
    mse = loss[0] is F.mse_loss
    off = outputs - targets if mse else outputs.sigmoid().sub_(targets)
    return off.mul_((1 + mse) / outputs[0].numel())


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


def known_loss(loss: Callable[[Any, Any], Any]) -> KnownLoss | None:
    """The loss as one whose gradient is known; None for any other."""
    inputs, outputs, targets = _Symbol(), _Symbol(), _Symbol()

    def model(x: Any) -> _Symbol:
        if x is not inputs:
            raise NotImplementedError
        return outputs

    try:
        function, given = loss(model, (inputs, targets))
    except Exception:  # whatever a function raises that needs a tensor
        return None
    ignored = given.pop("ignore_index", -100)
    plain = {"input": outputs, "target": targets, "reduction": "mean", "label_smoothing": 0.0}
    # others are such as weights of classes
    alike = all(value == plain.get(name) for name, value in given.items())
    return (function, ignored) if alike else None


Chain = tuple[list[Layer], KnownLoss]
"""The layers of a network in order, and what its outputs are compared by."""


class ChainDirection:
    """y ↦ ∇f_i(y) + plus of a cohort by the formulas of a chain; inside x + range(Pᵀ) z ↦ P ∇f_i(x + Pᵀz) + plus.

    Args:
        chain: The layers and the loss.
        layout: The blocks of x.
        clients: How many there are.
        x: The server's model; None with P = None.
        P: The subspace.
        batches: Examples that were gathered for several steps, and which of them to take, without end.
        finish: What a step makes of a gradient.
    """

    def __init__(
        self,
        chain: Chain,
        layout: Layout,
        clients: int,
        x: Vector | None,
        P: LinearMap | None,
        batches: Iterator[tuple[Parts, slice]],
        finish: Finish,
    ) -> None:
        (self.layers, self.loss), blocks = chain, layout.blocks
        self.clients, self.batches, self.finish = clients, batches, finish
        self.takes_steps = finish.bare and not callable(finish.plus)
        self.before = sum(layer.first for layer in self.layers) - 1  # layers before one is trained
        size = 1 if any(layer.dims == 3 for layer in self.layers) else clients
        self.shares = [slice(i, i + size) for i in range(0, clients, size)]
        self.sizes = layout.sizes if P is None else P.sizes
        factors = (None,) * len(blocks) if P is None else P.factors
        starts = [None] * len(blocks) if x is None else layout.split(x[0, 0]).values()
        self.blocks = list(zip(starts, factors, strict=True))
        self.shapes = [  # of the blocks of a point; a projected axis is the last
            b.shape if factor is None else (b.shape[0], *b.shape[2:], factor.rank)
            for b, factor in zip(blocks, factors, strict=True)
        ]
        self._parts: Parts | None = None

    def __call__(self, y: Vector) -> Vector:
        g = y.new_empty(1, self.clients, y.shape[-1])
        self._bind(self._split(y.expand_as(g)), self._split(g))
        self._run(*next(self.batches))
        return self.finish(g, y)

    def descend(self, start: Vector, lr: float, steps: int) -> Vector:
        """The end point of plain steps."""
        at = [part.expand(self.clients, *part.shape[1:]).clone() for part in self._split(start)]
        self._bind(at, itertools.repeat(None), lr)
        plus = self._split(self.finish.plus) if isinstance(self.finish.plus, Tensor) else []
        for _ in range(steps):
            self._run(*next(self.batches))
            for block, more in zip(at, plus, strict=False):
                block.sub_(more, alpha=lr)
        # the work after the steps can use the memory of the point; what was seen of the inputs stays
        self.weights.clear()
        for own in map(vars, self.layers):
            for name in [name for name, one in own.items() if isinstance(one, Tensor | Weight)]:
                del own[name]
        return torch.cat([block.flatten(1) for block in at], 1).unsqueeze(0)

    def _split(self, v: Vector) -> list[Tensor]:
        """Views (clients, *shape) of a vector (1, clients, size)."""
        parts = zip(v[0].split(self.sizes, 1), self.shapes, strict=True)
        return [part.unflatten(1, shape) for part, shape in parts]

    def _bind(self, at: list[Tensor], grads: Iterable[Tensor | None], lr: float = 0.0) -> None:
        """Sets the point, as blocks (clients, *shape), and where its gradients go."""
        self.weights = [
            [
                Weight(a[share], None if g is None else g[share], lr, *block)
                for block, a, g in zip(self.blocks, at, grads, strict=False)
            ]
            for share in self.shares
        ]

    def _run(self, parts: Parts, place: slice) -> None:
        """The gradients on the batch in `place` of the gathered examples (clients, examples, …)."""
        before, (first, *after) = self.layers[: self.before], self.layers[self.before :]
        fresh = parts is not self._parts
        if fresh:
            self._parts, self._seen = parts, list[Parts]()
            batch = len(range(*place.indices(parts[0].shape[1])))
            self._targets = of_targets(self.loss, parts[1], batch, parts[0].dtype)
        for number, (share, weights) in enumerate(zip(self.shares, self.weights, strict=True)):
            own = iter(weights)
            for layer in self.layers:
                if layer.params:
                    layer.w, layer.b = next(own), next(own) if layer.params == 2 else None
            if fresh:
                h = parts[0][share]
                for layer in before:
                    h = layer.forward(h)
                self._seen.append(first.seen(h))
            h = first.forward(*(part[:, place] for part in self._seen[number]))
            for layer in after:
                h = layer.forward(*layer.seen(h))
            d = by_outputs(self.loss, h, *(part[share, place] for part in self._targets))
            for layer in reversed(after):
                d = layer.backward(d)
            first.backward(d)


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
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    width, dims, known = 0, inputs.dim() - 1, known_loss(loss)
    alike = names == [block.name for block in layout.blocks]
    if known is None or not alike or any(_changed(module) for module in model.modules()):
        return None
    for _, module in model.named_modules(remove_duplicate=False):
        if type(module) is nn.Sequential:
            continue
        layer = _layer(module)
        if layer is None or layer.dims not in (dims, None):
            return None
        if isinstance(layer, Flatten):
            dims = 1
        if isinstance(layer, MaxPool) and layers and isinstance(layers[-1], ReLU):
            layers.insert(-1, layer)  # the same numbers, and ReLU has fewer to look at
        else:
            layers.append(layer)
        width = module.out_features if isinstance(module, nn.Linear) else width
    if dims != 1 or not width or not fits(known, targets, width):
        return None
    for layer in layers:
        layer.first = True
        if layer.params:
            break
    return layers, known


def _changed(module: nn.Module) -> bool:
    """Whether a module does more than its class says."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return (
        any(getattr(module, name) for name in hooks)
        or "forward" in vars(module)
        or any(p._backward_hooks for p in module.parameters())
    )


KINDS: dict[Any, type[Layer]] = {
    nn.Flatten: Flatten, nn.ReLU: ReLU, nn.MaxPool2d: MaxPool, nn.Linear: Linear, nn.Conv2d: Conv,
}  # fmt: skip
USUAL = {"padding_mode": "zeros", "return_indices": False, "start_dim": 1, "end_dim": -1}


def _layer(module: nn.Module) -> Layer | None:
    kind, given = KINDS.get(type(module)), vars(module)
    odd = any(given.get(name, value) != value for name, value in USUAL.items())
    return None if kind is None or odd or isinstance(given.get("padding"), str) else kind(module)
