"""Gradients of a whole cohort for chains of plain layers, without autograd.

A chain is an `nn.Sequential` of Linear, Conv2d, ReLU, MaxPool2d and Flatten (`nn.chain_layers`) with a loss that is
known (`nn.loss_gradient`). Products are batched over the clients, and no graph is recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from fedspan.core.layout import Layout
from fedspan.nn.chain_layers import Blocks, Conv, Flatten, Layer, Linear, MaxPool, ReLU, Weights
from fedspan.nn.loss_gradient import LossGradient

Tensor = torch.Tensor


class Chain:
    """The layers of a network in order."""

    def __init__(self, layers: Sequence[Layer], width: int) -> None:
        self.width = width  # numbers in the output of an example
        trained = next(i for i, layer in enumerate(layers) if isinstance(layer, Linear | Conv))
        for layer in layers[: trained + 1]:
            layer.first = True
        self.before, self.first, self.after = (
            layers[:trained],
            layers[trained],
            layers[trained + 1 :],
        )
        self.alone = any(layer.alone for layer in layers)

    def bind(self, weights: Weights) -> None:
        """Takes the weights of the point from which the next gradients are computed."""
        for layer in (self.first, *self.after):
            layer.bind(weights)

    def seen(self, x: Tensor) -> tuple[Tensor, ...]:
        """What the first trained layer needs of a round's inputs."""
        for layer in self.before:
            x = layer.forward(x)
        return self.first.seen(x)

    def forward(self, seen: tuple[Tensor, ...]) -> Tensor:
        """The outputs."""
        h = self.first.forward(*seen)
        for layer in self.after:
            h = layer.forward(*layer.seen(h))
        return h

    def backward(self, d: Tensor) -> None:
        """Writes the gradients of all weights, given that of the outputs."""
        for layer in reversed(self.after):
            d = layer.backward(d)
        self.first.backward(d)

    def release(self) -> None:
        """Drops what the layers keep of the last pass."""
        for layer in (*self.before, self.first, *self.after):
            layer.release()


class ChainRun:
    """Gradients and steps of a cohort along one direction of a round."""

    def __init__(self, chain: Chain, loss: LossGradient, blocks: Blocks, clients: int) -> None:
        self.chain, self.loss, self.blocks = chain, loss, blocks
        size = 1 if chain.alone else clients
        self.shares = [slice(i, i + size) for i in range(0, clients, size)]
        self._parts: tuple[Tensor, ...] | None = None

    def bind(self, at: list[Tensor], grads: list[Tensor] | None, lr: float = 0.0) -> None:
        """Sets the point, as blocks (clients, *shape), and where its gradients go."""
        self.weights = [self.blocks.weights(at, grads, lr, share) for share in self.shares]

    def __call__(self, parts: tuple[Tensor, ...], place: slice) -> None:
        """The gradients on the batch in `place` of the gathered examples."""
        fresh = parts is not self._parts
        if fresh:
            self._parts, self._seen = parts, []
            batch, dtype = len(range(*place.indices(parts[0].shape[1]))), parts[0].dtype
            self._targets = self.loss.ready(parts[1], batch, dtype)
        for number, (share, weights) in enumerate(zip(self.shares, self.weights, strict=True)):
            self.chain.bind(weights)
            if fresh:
                self._seen.append(self.chain.seen(parts[0][share]))
            outputs = self.chain.forward(tuple(part[:, place] for part in self._seen[number]))
            self.chain.backward(self.loss(outputs, *(part[share, place] for part in self._targets)))

    def release(self) -> None:
        """Drops the point, whose memory the work after the steps can use. What was seen of the inputs stays."""
        self.weights = []
        self.chain.release()


def chain_of(model: nn.Module, layout: Layout, dims: int) -> Chain | None:
    """The model as a chain, for examples with `dims` axes.

    None where it has other layers, frozen or shared weights, or hooks, or where its outputs are not rows.
    """
    layers: list[Layer] = []
    names: list[str] = []
    width = 0
    if any(_changed(module) for module in model.modules()):
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
    rows = dims == 1 and width
    return (
        Chain(layers, width)
        if rows and sorted(names) == sorted(block.name for block in layout.blocks)
        else None
    )


def _modules(model: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The layers of nested Sequentials, in order, with what their parameters' names begin with."""
    if type(model) is not nn.Sequential:
        yield prefix, model
        return
    for (
        key,
        child,
    ) in model._modules.items():  # `named_children` leaves out a layer that is used again
        assert child is not None
        yield from _modules(child, f"{prefix}{key}.")


def _changed(module: nn.Module) -> bool:
    """Whether a module does more than its class says."""
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return (
        any(hooks)
        or "forward" in vars(module)
        or any(p._backward_hooks for p in module.parameters())
    )


def _layer(prefix: str, module: nn.Module) -> Layer | None:
    if type(module) is nn.Linear:
        return Linear(prefix, module.bias is not None)
    if (
        type(module) is nn.Conv2d
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
    ):
        return Conv(prefix, module)
    if type(module) is nn.MaxPool2d and not module.return_indices:
        return MaxPool(module)
    if type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
        return Flatten()
    return ReLU() if type(module) is nn.ReLU else None
