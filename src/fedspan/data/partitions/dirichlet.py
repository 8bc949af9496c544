"""Each class is divided in Dirichlet(α) proportions: the smaller α, the fewer classes per client (Hsu et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedspan.core.partition import Indices, fill_empty
from fedspan.core.registry import register
from fedspan.data.partitions._proportions import Proportions


@register
@dataclass(frozen=True, kw_only=True)
class Dirichlet(Proportions):
    """Unequal shares of every class."""

    def assign(self, labels: Indices, clients: int, rng: np.random.Generator) -> list[Indices]:
        parts: list[list[Indices]] = [[] for _ in range(clients)]
        for label in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == label))
            shares = np.split(members, self.cuts(clients, len(members), rng))
            for part, share in zip(parts, shares, strict=True):
                part.append(share)
        return fill_empty([np.sort(np.concatenate(part)) for part in parts], rng)
