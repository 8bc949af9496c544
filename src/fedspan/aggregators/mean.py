"""The mean of the replies by the clients' weights; the default. One reply can move it anywhere."""

from dataclasses import dataclass

from fedspan import Aggregator, Round, Vector, register


@register
@dataclass(frozen=True, kw_only=True)
class Mean(Aggregator):
    """The plain mean."""

    bounded = False

    def combine(self, v: Vector, rnd: Round) -> Vector:
        return rnd.mean(v)
