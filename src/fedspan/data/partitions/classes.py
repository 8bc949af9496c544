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
        # the classes of each client, from shuffled decks of all classes
        deck: deque[int] = deque()  # cards are taken near its front
        while len(deck) < clients * self.classes_per_client:
            deck += rng.permutation(len(names)).tolist()
        hands: list[set[int]] = [set() for _ in range(clients)]
        for hand in hands:
            for _ in range(self.classes_per_client):
                card = next((one for one in deck if one not in hand), None)
                if card is None:
                    hand.add(int(rng.integers(len(names))))
                else:
                    hand.add(card)
                    deck.remove(card)
        # the examples of each class
        parts: list[list[Indices]] = [[] for _ in range(clients)]
        for number, name in enumerate(names):
            holders = [part for part, hand in zip(parts, hands, strict=True) if number in hand]
            if holders:
                members = rng.permutation(np.flatnonzero(labels == name))
                shares = np.array_split(members, len(holders))
                for part, share in zip(holders, shares, strict=True):
                    part.append(share)
        return [np.sort(np.concatenate(part)) for part in parts]
