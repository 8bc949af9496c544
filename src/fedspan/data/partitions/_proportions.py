"""Shares of examples in Dirichlet(α) proportions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedspan.core.errors import SpecError, positive
from fedspan.core.partition import Indices, Partition

MOST_ALPHA = 1e15  # beyond it, shares are equal to the last digit


@dataclass(frozen=True, kw_only=True)
class Proportions(Partition):
    """A partition that draws shares of Dirichlet(α) sizes."""

    alpha: float = 0.5  # α: the smaller, the more unequal

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.alpha, int | float) and MOST_ALPHA < self.alpha < float("inf"):
            raise SpecError(
                f"`alpha` must be at most {MOST_ALPHA:g}, got {str(self.alpha)[:40]}; use the partition iid for equal "
                "shares"
            )
        positive("alpha", self.alpha)

    def cuts(self, clients: int, examples: int, rng: np.random.Generator) -> Indices:
        """Return where to cut a row of examples into one share per client."""
        shares = np.cumsum(rng.dirichlet(np.full(clients, self.alpha)))[:-1]
        return (shares * examples).astype(int)
