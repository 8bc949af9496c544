"""Partitions as values: how a data set is divided among clients. One file each in `fedspan/data/partitions`."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from fedspan.core import seeds
from fedspan.core.errors import SpecError, at_least
from fedspan.core.layout import Ints

Indices = Ints


@dataclass(frozen=True, kw_only=True)
class Partition(ABC):
    """A way of dividing examples among clients."""

    clients: int | None = None  # how many clients there are

    def __post_init__(self) -> None:
        if self.clients is not None:
            at_least("clients", self.clients, 1)

    def split(self, labels: Indices, seed: int = 0, owners: Indices | None = None) -> list[Indices]:
        """Divides examples among clients.

        Args:
            labels: The class of each example.
            seed: Decides the random parts.
            owners: Who made each example, for the natural partition.

        Returns:
            The example numbers of each client.
        """
        if self.clients is None:
            raise SpecError(
                "`clients` is missing; only the partition 'natural' knows how many there are"
            )
        if self.clients > len(labels):
            raise SpecError(
                f"`clients` is {self.clients}, but there are only {len(labels)} examples"
            )
        # a generator of its own: a partition is made once, by whoever holds the data
        key = seeds.key(seed, f"partition.{type(self).__name__.lower()}")
        return self.assign(labels, self.clients, np.random.Generator(np.random.PCG64(key)))

    @abstractmethod
    def assign(self, labels: Indices, clients: int, rng: np.random.Generator) -> list[Indices]:
        """The example numbers of each client."""


def fill_empty(parts: list[Indices], rng: np.random.Generator) -> list[Indices]:
    """Moves one example from the largest client to each client without any."""
    largest_first = [(-len(part), client) for client, part in enumerate(parts)]
    heapq.heapify(largest_first)
    for client in [client for client, part in enumerate(parts) if len(part) == 0]:
        size, largest = -largest_first[0][0], largest_first[0][1]
        if size < 2:
            raise SpecError(f"there are fewer examples than the {len(parts)} clients")
        place = int(rng.integers(size))
        parts[client] = parts[largest][place : place + 1]
        parts[largest] = np.delete(parts[largest], place)
        heapq.heapreplace(largest_first, (1 - size, largest))
    return parts
