"""A pull back to the server's model: μ (y − x) is added to local gradients (Li et al. 2020, arXiv:1812.06127).

Local steps then descend on f_i(y) + (μ/2) ‖y − x‖². Inside a subspace y − x = Pᵀz, and the term is μ z.
"""

from dataclasses import dataclass
from typing import Any

from fedspan import Drift, LinearMap, Vector, register
from fedspan.core.errors import not_negative
from fedspan.core.objective import Plus


@register
@dataclass(frozen=True)
class Proximal(Drift):
    """Local steps that stay near the server's model."""

    mu: float = 0.1  # μ: strength of the pull back to the server's model

    def __post_init__(self) -> None:
        not_negative("mu", self.mu)

    def plus(self, work: Any, x: Vector, P: LinearMap) -> Plus:
        if P.whole:
            return lambda y: self.mu * (y - x)
        return lambda z: self.mu * z
