"""Norm bound: the mean after every reply is shortened to a bound, or to a multiple of the replies' median norm.

It takes away the advantage of large replies, such as scaled ones. A reply of the usual size that points elsewhere
counts like any other. Clients keep their weights.
"""

from dataclasses import dataclass

from fedspan import Aggregator, Round, Vector, register
from fedspan.core.aggregator import clipped, middle, sizes
from fedspan.core.errors import positive


@register
@dataclass(frozen=True, kw_only=True)
class NormBound(Aggregator):
    """The mean of shortened replies."""

    translates = False
    bound: float | None = None  # largest norm of a reply; none: `factor` times the median norm
    factor: float = 1.0  # multiple of the median norm, where there is no `bound`

    def __post_init__(self) -> None:
        positive("factor", self.factor)
        if self.bound is not None:
            positive("bound", self.bound)

    def combine(self, v: Vector, rnd: Round) -> Vector:
        most = self.factor * middle(sizes(v)) if self.bound is None else self.bound
        return rnd.mean(clipped(v, most))
