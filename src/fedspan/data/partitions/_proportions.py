"""Shares of examples in Dirichlet(α) proportions."""

from __future__ import annotations

import numpy as np

from fedspan.core.partition import Indices


def cuts(alpha: float, clients: int, examples: int, rng: np.random.Generator) -> Indices:
    """Return where to cut a row of examples into one share per client, of Dirichlet(α) sizes."""
    shares = np.cumsum(rng.dirichlet(np.full(clients, alpha)))[:-1]
    return (shares * examples).astype(int)
