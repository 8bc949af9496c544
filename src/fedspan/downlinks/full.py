"""x in full, d values in every round; clients keep no copy of it."""

from dataclasses import dataclass

from fedspan import Downlink, register


@register
@dataclass(frozen=True)
class FullModel(Downlink):
    """d values per round."""
