"""Random shares of Dirichlet(α) sizes: the same distribution, different amounts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedspan.core.errors import positive
from fedspan.core.partition import Indices, Partition, fill_empty
from fedspan.core.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class Quantity(Partition):
    """Unequal amounts."""

    alpha: float = 0.5  # α: the smaller, the more unequal

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("alpha", self.alpha)

    def assign(self, labels: Indices, clients: int, rng: np.random.Generator) -> list[Indices]:
        places = self.cuts(clients, len(labels), rng)
        parts = np.split(rng.permutation(len(labels)), places)
        return fill_empty([np.sort(part) for part in parts], rng)

    def cuts(self, clients: int, examples: int, rng: np.random.Generator) -> Indices:
        """Return where to cut a row of examples into one share per client, of Dirichlet(α) sizes."""
        shares = np.cumsum(rng.dirichlet(np.full(clients, self.alpha)))[:-1]
        return (shares * examples).astype(int)
