"""x in full, d values in every round; clients keep no copy of it."""

from __future__ import annotations

from dataclasses import dataclass

from fedspan import Downlink, Round, Vector, register
from fedspan.core.axes import Parts
from fedspan.core.bundle import Bundle
from fedspan.core.linear_map import LinearMap


@register
@dataclass(frozen=True)
class FullModel(Downlink):
    """d values per round."""

    logs = False

    def down(self, server: Bundle, rnd: Round) -> Parts:
        return {"x": server.x}

    def model(self, down: Bundle) -> Vector:
        x: Vector = down.x
        return x

    def send(self, server: Bundle, move: Vector, P: LinearMap, rnd: Round) -> tuple[Vector, Parts]:
        return move, {}
