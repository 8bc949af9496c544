"""Random shares of Dirichlet(α) sizes: the same distribution, different amounts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedspan.core.partition import Indices, fill_empty
from fedspan.core.registry import register
from fedspan.data.partitions._proportions import Proportions


@register
@dataclass(frozen=True, kw_only=True)
class Quantity(Proportions):
    """Unequal amounts."""

    def assign(self, labels: Indices, clients: int, rng: np.random.Generator) -> list[Indices]:
        places = self.cuts(clients, len(labels), rng)
        parts = np.split(rng.permutation(len(labels)), places)
        return fill_empty([np.sort(part) for part in parts], rng)
