"""Trimmed mean: the mean of the middle values of each coordinate (Yin et al. 2018, arXiv:1803.01498).

With `share` of at least the share of hostile clients in a round, every coordinate of the result is between values of
honest clients. Every client counts once, whatever its weight: a weight would multiply what a hostile client can do.
"""

import math
from dataclasses import dataclass

from fedspan import Aggregator, Round, SpecError, Vector, register
from fedspan.core.errors import positive, shown


@register
@dataclass(frozen=True, kw_only=True)
class TrimmedMean(Aggregator):
    """The mean of the middle values."""

    share: float = 0.2  # of the replies left out at each end, rounded up; one is kept

    def __post_init__(self) -> None:
        positive("share", self.share)
        if self.share >= 0.5:
            raise SpecError(
                f"`share` must be below 0.5, got {shown(self.share)}; for the middle value alone use median"
            )

    def combine(self, v: Vector, rnd: Round) -> Vector:
        count = v.shape[1]
        out = min(math.ceil(self.share * count), (count - 1) // 2)
        return v.sort(1).values[:, out : count - out].mean(1, keepdim=True)
