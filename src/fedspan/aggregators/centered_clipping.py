"""Centered clipping: the mean of replies shortened around a center (Karimireddy et al. 2021, arXiv:2012.10333).

     1  m ← median of each coordinate
     2  m ← m + mean_S (v_i − m) min(1, τ/‖v_i − m‖)                  `steps` times

Differences from the paper: line 1. The paper starts from the result of the round before. A subspace method draws new
coordinates in every round, in which that result means nothing, so each round finds its own center and no state is kept.
"""

from dataclasses import dataclass

from fedspan import Aggregator, Round, Vector, register
from fedspan.core.aggregator import clipped, middle, sizes
from fedspan.core.errors import at_least, positive


@register
@dataclass(frozen=True, kw_only=True)
class CenteredClipping(Aggregator):
    """The mean of replies that are shortened around their center."""

    radius: float | None = None  # τ; none: the median distance from the center, anew in every step
    steps: int = 3  # how often line 2 is repeated

    def __post_init__(self) -> None:
        at_least("steps", self.steps, 1)
        if self.radius is not None:
            positive("radius", self.radius)

    def combine(self, v: Vector, rnd: Round) -> Vector:
        m = middle(v)  # 1
        for _ in range(self.steps):
            apart = v - m
            m = m + rnd.mean(
                clipped(apart, middle(sizes(apart)) if self.radius is None else self.radius)
            )  # 2
        return m
