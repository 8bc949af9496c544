"""Vectors as they are, in the type of the model."""

from dataclasses import dataclass

from fedspan import Uplink, register


@register
@dataclass(frozen=True)
class Plain(Uplink):
    """r values per reply."""
