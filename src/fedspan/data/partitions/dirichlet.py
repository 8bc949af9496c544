"""Each class is divided in Dirichlet(α) proportions: the smaller α, the fewer classes per client (Hsu et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedspan.core.errors import positive
from fedspan.core.partition import Indices, Partition, fill_empty
from fedspan.core.registry import register
from fedspan.data.partitions._proportions import cuts


@register
@dataclass(frozen=True, kw_only=True)
class Dirichlet(Partition):
    """Unequal shares of every class."""

    alpha: float = 0.5  # α: the smaller, the more unequal

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("alpha", self.alpha)

    def assign(self, labels: Indices, clients: int, rng: np.random.Generator) -> list[Indices]:
        parts: list[list[Indices]] = [[] for _ in range(clients)]
        for label in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == label))
            shares = np.split(members, cuts(self.alpha, clients, len(members), rng))
            for part, share in zip(parts, shares, strict=True):
                part.append(share)
        return fill_empty([np.sort(np.concatenate(part)) for part in parts], rng)
