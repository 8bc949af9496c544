"""The mean direction of the round, times a step size η_g."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fedspan import Round, Server, Vector, register
from fedspan.core.axes import Parts
from fedspan.core.bundle import Bundle
from fedspan.core.errors import positive
from fedspan.core.linear_map import LinearMap


@register
@dataclass(frozen=True)
class Mean(Server):
    """x ← x − η_g Pᵀ direction."""

    lr: float = 1.0  # η_g: step size of the server

    def __post_init__(self) -> None:
        positive("lr", self.lr)

    def step(
        self,
        server: Bundle,
        direction: Vector,
        P: LinearMap,
        rnd: Round,
        each: Callable[[], Vector],
    ) -> tuple[Vector, Parts]:
        return direction if self.lr == 1 else self.lr * direction, {}
