"""The mean direction of the round, times a step size η_g."""

from dataclasses import dataclass

from fedspan import Server, register


@register
@dataclass(frozen=True)
class Mean(Server):
    """x ← x − η_g Pᵀ direction."""
