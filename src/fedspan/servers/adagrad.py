"""Adagrad: v only grows, so that steps only get shorter (Reddi et al. 2021, arXiv:2003.00295).

     2  v ← v + Δ²                     elementwise; the other lines are in `_adaptive`

As in the paper's experiments, β_1 is 0 by default.
"""

from dataclasses import dataclass

from fedspan import Vector, register
from fedspan.servers._adaptive import Adaptive


@register
@dataclass(frozen=True)
class Adagrad(Adaptive):
    """A sum of Δ²."""

    beta1: float = 0.0  # β_1: momentum

    def second_moment(self, v: Vector, square: Vector) -> Vector:
        return v + square
