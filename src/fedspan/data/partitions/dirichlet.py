"""Each class is divided in Dirichlet(α) proportions: the smaller α, the fewer classes per client (Hsu et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedspan.core.partition import Indices, fill_empty
from fedspan.core.registry import register
from fedspan.data.partitions.quantity import Quantity


@register
@dataclass(frozen=True, kw_only=True)
class Dirichlet(Quantity):
    """Unequal shares of every class."""

    def assign(self, labels: Indices, clients: int, rng: np.random.Generator) -> list[Indices]:
        of_classes = []
        for label in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == label))
            of_classes.append(np.split(members, self.cuts(clients, len(members), rng)))
        parts = zip(*of_classes, strict=True)
        return fill_empty([np.sort(np.concatenate(part)) for part in parts], rng)
