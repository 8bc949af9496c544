"""Geometric median: the point of least total distance to the replies (Pillutla et al. 2022, arXiv:1912.13445).

     1  m ← median of each coordinate
     2  β_i ← w_i / max(‖v_i − m‖, ν);  m ← Σ β_i v_i / Σ β_i          `steps` times (Weiszfeld)

ν is `smoothing` times the median distance of line 1. It holds as long as less than half of the weight is hostile.

Differences from the paper: line 1, where the paper starts from the mean, which one huge reply moves far away.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedspan import Aggregator, Round, Vector, register
from fedspan.core.aggregator import middle, sizes
from fedspan.core.errors import at_least, positive


@register
@dataclass(frozen=True, kw_only=True)
class GeometricMedian(Aggregator):
    """Weiszfeld's smoothed iteration."""

    steps: int = 8  # iterations
    smoothing: float = 1e-3  # smallest distance, as a multiple of the median one

    def __post_init__(self) -> None:
        at_least("steps", self.steps, 1)
        positive("smoothing", self.smoothing)

    def combine(self, v: Vector, rnd: Round) -> Vector:
        m = middle(v)  # 1
        least = (self.smoothing * middle(sizes(v - m))).clamp(min=1e-300)
        for _ in range(self.steps):
            near = 1 / sizes(v - m).clamp(min=least)
            share = near if rnd.weights is None else near * rnd.weights
            m = ((share / share.sum(1, keepdim=True)).to(v.dtype) * v).sum(1, keepdim=True)  # 2
        return m
