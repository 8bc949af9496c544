"""Equal random shares: every client has the same distribution."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedspan.core.partition import Indices, Partition
from fedspan.core.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class IID(Partition):
    """Equal random shares."""

    def assign(self, labels: Indices, clients: int, rng: np.random.Generator) -> list[Indices]:
        return [np.sort(part) for part in np.array_split(rng.permutation(len(labels)), clients)]
