"""SGD: y ← y − η g; with momentum v ← β v + g, y ← y − η v, as torch.optim.SGD.

g is the direction of the method: in `scaffold` the corrected gradient ∇f_i + c − c_i.
"""

import functools
from dataclasses import dataclass
from typing import Literal

import torch

from fedspan.core.axes import Optimizer
from fedspan.core.errors import SpecError, below_one
from fedspan.core.layout import Vector
from fedspan.core.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """SGD; its memory is v: n numbers, none without momentum. "project" carries it to the client's next P."""

    momentum: float = 0.0  # β: weight of the past direction in each step
    moments: Literal["reset", "project"] = "reset"  # memory between a client's rounds

    def __post_init__(self) -> None:
        below_one("momentum", self.momentum)
        if self.moments != "reset" and self.plain:
            raise SpecError(f"`moments` {self.moments!r}: plain steps have none; set `momentum`")

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
