"""No correction: clients send what their steps came to, and x moves by the mean of that."""

from dataclasses import dataclass

from fedspan import Drift, register


@register
@dataclass(frozen=True)
class NoDrift(Drift):
    """Plain averaging."""
