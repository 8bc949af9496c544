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
        cuts = np.cumsum(rng.dirichlet(np.full(clients, self.alpha)))[:-1]
        parts = np.split(rng.permutation(len(labels)), (cuts * len(labels)).astype(int))
        return fill_empty([np.sort(part) for part in parts], rng)
