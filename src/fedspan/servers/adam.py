"""Adam: v is an exponential mean of squared directions (Reddi et al. 2021, arXiv:2003.00295).

2  v ← β_2 v + (1 − β_2) Δ²       elementwise; the other lines are in `_adaptive`
"""

from dataclasses import dataclass

from fedspan import Vector, register
from fedspan.core.errors import below_one
from fedspan.servers._adaptive import Adaptive


@register
@dataclass(frozen=True)
class Adam(Adaptive):
    """An exponential mean of Δ²."""

    beta2: float = 0.99  # β_2: decay of v per round

    def __post_init__(self) -> None:
        super().__post_init__()
        below_one("beta2", self.beta2)

    def second_moment(self, v: Vector, square: Vector) -> Vector:
        return self.beta2 * v + (1 - self.beta2) * square
