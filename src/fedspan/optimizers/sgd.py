"""SGD: y ← y − η g; with momentum v ← β v + g, y ← y − η v, as torch.optim.SGD.

g is the direction of the method: in `scaffold` the corrected gradient ∇f_i + c − c_i.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from fedspan.core.errors import below_one
from fedspan.core.layout import Vector
from fedspan.core.linear_map import LinearMap
from fedspan.core.optimizer import Optimizer, turned
from fedspan.core.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """SGD; its memory is v: n numbers, none without momentum."""

    momentum: float = 0.0  # β: weight of the past direction in each step

    def __post_init__(self) -> None:
        below_one("momentum", self.momentum)

    @functools.cached_property
    def plain(self) -> bool:  # type: ignore[override]
        """Without momentum."""
        return not self.momentum

    def step(self, y: Vector, g: Vector, memory: Vector, lr: float, origin: Vector | None) -> None:
        if self.momentum:
            g = torch.add(g, memory, alpha=self.momentum, out=memory)
        y.add_(g, alpha=-lr)

    def size(self, n: int) -> int:
        return n if self.momentum else 0

    def carry(self, held: Vector, old: LinearMap, new: LinearMap) -> Vector:
        return turned(held, old, new)
