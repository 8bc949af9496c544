"""Median: of each coordinate the middle value of the replies (Yin et al. 2018, arXiv:1803.01498).

Fewer than half of the clients cannot move it beyond values of honest ones. Where clients differ much it is far from
their mean. Every client counts once, whatever its weight.
"""

from dataclasses import dataclass

from fedspan import Aggregator, Round, Vector, register
from fedspan.core.aggregator import middle


@register
@dataclass(frozen=True, kw_only=True)
class Median(Aggregator):
    """The coordinate-wise median."""

    def combine(self, v: Vector, rnd: Round) -> Vector:
        return middle(v)
