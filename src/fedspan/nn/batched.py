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
from fedspan.core.objective import Direction, Objective
from fedspan.core.projector import LinearMap
from fedspan.nn.objective import TorchObjective, finish_

if TYPE_CHECKING:
    from fedspan.nn.problem import TorchProblem

Tensors = dict[str, torch.Tensor]


class _At:
    """The module with other weights, to be called like it."""

    def __init__(self, model: nn.Module, weights: Tensors) -> None:
        self.model, self.weights = model, weights

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self.model, self.weights, args, kwargs)


class Cohort(Objective):
    """f_i of all clients of a round, together."""

    def __init__(self, problem: TorchProblem, alone: list[TorchObjective]) -> None:
        self.problem, self.alone, self.training = problem, alone, problem.training
        blocks = problem.layout.blocks
        self.names, self.shapes, self.sizes = ([getattr(b, k) for b in blocks] for k in ("name", "shape", "size"))
        self._gradient = vmap(grad(self._loss))

    def grad(self, y: Vector) -> Vector:
        """∇f_i(y) of every client on its next mini-batch."""
        return finish_(self._at(y), self.training, y)

    def full_grad(self, x: Vector) -> Vector:
        """∇f_i(x) of every client over all its examples, one after the other."""
        return torch.cat([one.full_grad(x) for one in self.alone], 1)

    def restrict(self, x: Vector, P: LinearMap, plus: Vector | None = None) -> Direction:
        """z ↦ P ∇f_i(x + Pᵀz) + plus, by full gradients; clipped is what a step uses, P ∇f."""
        base = P @ x if self.training.weight_decay else None

        def direction(z: Vector) -> Vector:
            g = finish_(P @ self._at(x + P.T @ z), self.training, z, base)
            return g if plus is None else g + plus

        return direction

    def _loss(self, weights: Tensors, *batch: torch.Tensor) -> torch.Tensor:
        return self.problem.loss(_At(self.problem.model, weights), batch)  # type: ignore[arg-type]

    def _at(self, y: Vector) -> Vector:
        batches = [torch.stack(parts) for parts in zip(*(next(one.batches) for one in self.alone), strict=True)]
        with torch.inference_mode(False), torch.no_grad():
            own = y.expand(1, len(self.alone), -1)[0].clone()
            parts = zip(self.names, own.split(self.sizes, 1), self.shapes, strict=True)
            weights = {name: part.view(-1, *shape) for name, part, shape in parts}
            found = self._gradient(weights, *batches)
            return torch.cat([found[name].reshape(len(own), -1) for name in self.names], 1).unsqueeze(0)
