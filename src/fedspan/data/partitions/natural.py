"""By who made each example, where the data set says so: writers, speakers, hospitals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedspan.core.errors import SpecError
from fedspan.core.partition import Indices, Partition
from fedspan.core.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class Natural(Partition):
    """One client per owner; with `clients`, those owners that have the most examples."""

    def split(self, labels: Indices, seed: int = 0, owners: Indices | None = None) -> list[Indices]:
        """The examples of each owner."""
        if owners is None:
            raise SpecError(
                "this data set does not say who made which example; use another `partition` than 'natural'"
            )
        names, numbers, counts = np.unique(owners, return_inverse=True, return_counts=True)
        if self.clients is not None and self.clients > len(names):
            raise SpecError(
                f"`clients` is {self.clients}, but the data set has {len(names)} natural clients"
            )
        parts = np.split(np.argsort(numbers, kind="stable"), np.cumsum(counts)[:-1])
        return [
            parts[number] for number in np.sort(np.argsort(-counts, kind="stable")[: self.clients])
        ]

    def assign(self, labels: Indices, clients: int, rng: np.random.Generator) -> list[Indices]:
        raise NotImplementedError("a natural partition needs owners; call split()")
