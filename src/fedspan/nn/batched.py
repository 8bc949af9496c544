"""A whole cohort as one batched computation: `torch.func.vmap` over the clients' weights and mini-batches.

Faster than client by client for networks of plain matrix products, slower for convolutions. It needs batches of equal
shape, no running statistics and no randomness inside the network.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from fedspan.core.layout import Vector
from fedspan.core.method import Round
from fedspan.core.objective import Objective

if TYPE_CHECKING:
    from fedspan.nn.problem import TorchObjective, TorchProblem

Tensors = dict[str, torch.Tensor]


class _At:
    """The module with other weights, to be called like it."""

    def __init__(self, model: nn.Module, weights: Tensors) -> None:
        self.model, self.weights = model, weights

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self.model, self.weights, args, kwargs)


class Cohort(Objective):
    """f_i of all clients of a round, together."""

    def __init__(self, problem: TorchProblem, rnd: Round, alone: list[TorchObjective]) -> None:
        self.problem, self.alone = problem, alone
        self.names = [block.name for block in problem.layout.blocks]
        self.shapes = [block.shape for block in problem.layout.blocks]
        self.sizes = [block.size for block in problem.layout.blocks]
        self._gradient = vmap(grad(self._loss))

    def grad(self, y: Vector) -> Vector:
        """∇f_i(y) of every client on its next mini-batch."""
        batches = [next(one.batches) for one in self.alone]
        return self._at(y, [torch.stack(parts) for parts in zip(*batches, strict=True)])

    def full_grad(self, x: Vector) -> Vector:
        """∇f_i(x) of every client over all its examples, one after the other."""
        return torch.cat([one.full_grad(x) for one in self.alone], 1)

    def _loss(self, weights: Tensors, *batch: torch.Tensor) -> torch.Tensor:
        return self.problem.loss(_At(self.problem.model, weights), batch)  # type: ignore[arg-type]

    def _at(self, y: Vector, batch: list[torch.Tensor]) -> Vector:
        with torch.inference_mode(False), torch.no_grad():
            own = y.expand(1, len(self.alone), -1)[0].clone()
            parts = zip(self.names, own.split(self.sizes, 1), self.shapes, strict=True)
            weights = {name: part.view(-1, *shape) for name, part, shape in parts}
            found = self._gradient(weights, *batch)
            g = torch.cat([found[name].reshape(len(own), -1) for name in self.names], 1).unsqueeze(0)
        return self.problem.finished(g, y)
