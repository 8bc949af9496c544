"""Vectors as they are, in the type of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedspan import Round, Uplink, Vector, register
from fedspan.core.axes import Parts
from fedspan.core.bundle import Bundle
from fedspan.core.linear_map import LinearMap


@register
@dataclass(frozen=True)
class Plain(Uplink):
    """r values per reply."""

    plain_sum = True

    def send(self, v: Vector, client: Bundle, P: LinearMap, rnd: Round) -> tuple[Vector, Parts]:
        return v, {}

    def receive(self, sent: Any, P: LinearMap, rnd: Round) -> Vector:
        v: Vector = sent
        return v
