"""Each client has the same number of classes, dealt evenly; the clients that have a class share it equally."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from fedspan.core.errors import SpecError, at_least
from fedspan.core.partition import Indices, Partition
from fedspan.core.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class Classes(Partition):
    """A few classes per client."""

    classes_per_client: int = 2  # how many classes each client has

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("classes_per_client", self.classes_per_client, 1)

    def assign(self, labels: Indices, clients: int, rng: np.random.Generator) -> list[Indices]:
        names = np.unique(labels)
        if self.classes_per_client > len(names):
            raise SpecError(
                f"`classes_per_client` must be from 1 to the {len(names)} classes, got {self.classes_per_client}"
            )
        hands = self._deal(len(names), clients, rng)
        parts: list[list[Indices]] = [[] for _ in range(clients)]
        for number, name in enumerate(names):
            holders = [client for client in range(clients) if number in hands[client]]
            if holders:
                members = rng.permutation(np.flatnonzero(labels == name))
                for client, share in zip(
                    holders, np.array_split(members, len(holders)), strict=True
                ):
                    parts[client].append(share)
        return [np.sort(np.concatenate(part)) for part in parts]

    def _deal(self, classes: int, clients: int, rng: np.random.Generator) -> list[set[int]]:
        """The classes of each client, from shuffled decks of all classes."""
        deck: deque[int] = deque()  # cards are taken near its front
        while len(deck) < clients * self.classes_per_client:
            deck += rng.permutation(classes).tolist()
        hands: list[set[int]] = [set() for _ in range(clients)]
        for hand in hands:
            for _ in range(self.classes_per_client):
                place = next((i for i, card in enumerate(deck) if card not in hand), None)
                if place is None:
                    hand.add(int(rng.integers(classes)))
                else:
                    hand.add(deck[place])
                    del deck[place]
        return hands
