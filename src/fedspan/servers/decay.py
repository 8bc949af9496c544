"""A step along the mean direction that also shrinks the model.

    x ← x − η_g Pᵀ(direction + λ P x)                            outside the subspace x stays

It bounds x where directions have no size, as in FedSMU: entries of ±1 keep |x_j| below 1/λ.
"""

from dataclasses import dataclass, field

from fedspan import Bundle, LinearMap, Parts, Round, Server, Vector, register
from fedspan.core.errors import not_negative


@register
@dataclass(frozen=True)
class Decay(Server):
    """The mean direction and weight decay."""

    lr: float = field(default=0.015, kw_only=True)  # η_g: step size of the server
    decay: float = 0.01  # λ: weight decay per round, times η_g

    def __post_init__(self) -> None:
        super().__post_init__()
        not_negative("decay", self.decay)

    def step(
        self, server: Bundle, direction: Vector, P: LinearMap, rnd: Round, each: Vector
    ) -> tuple[Vector, Parts]:
        return self.lr * (direction + self.decay * (P @ server.x)), {}
