"""Shares of examples in Dirichlet(α) proportions."""

from __future__ import annotations

import numpy as np

from fedspan.core.errors import SpecError, positive
from fedspan.core.partition import Indices

MOST = 1e15  # beyond it, shares are equal to the last digit


def check_alpha(alpha: object) -> None:
    """Refuses an α that is not positive, or too large to draw with."""
    if isinstance(alpha, int | float) and MOST < alpha < float("inf"):
        raise SpecError(
            f"`alpha` must be at most {MOST:g}, got {str(alpha)[:40]}; use the partition iid for equal shares"
        )
    positive("alpha", alpha)


def cuts(alpha: float, clients: int, examples: int, rng: np.random.Generator) -> Indices:
    """Where to cut a row of examples into one share per client."""
    shares = np.cumsum(rng.dirichlet(np.full(clients, alpha)))[:-1]
    return (shares * examples).astype(int)
