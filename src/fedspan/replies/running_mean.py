"""The mean of large replies, taken as they arrive: one vector in memory instead of one per client.

The result equals `Round.mean` of all replies to the last bit. Torch adds the rows of a matrix in blocks, and so does
this. The last few columns it adds in another order; of these the rows are kept.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from fedspan.core import wire
from fedspan.core.bundle import STATISTIC, Bundle
from fedspan.core.layout import Vector
from fedspan.core.round import Round

COLUMNS = 64  # torch adds so many columns at once
LEVELS = 4  # of torch's partial sums


class Gathered:
    """All replies of a cohort, which come in its order."""

    def __init__(self) -> None:
        self.ups: list[Any] = []

    def add(self, _place: int, up: Any) -> None:
        """Takes in one reply."""
        self.ups.append(up)

    def reply(self) -> Any:
        """The replies as one, (runs, S, n)."""
        return wire.gather(self.ups)


class RunningMean:
    """mean_S of the vectors of a cohort's replies, which come in the order of the cohort."""

    def __init__(self, rnd: Round) -> None:
        self.rnd = rnd
        self.sums: dict[str, _Sum] = {}
        self.places: list[int] = []  # whose replies were added

    def add(self, place: int, up: Any) -> None:
        """Takes in the reply of one place, whose vectors it may change."""
        self.places.append(place)
        for name, vector in vars(up).items():
            own = self.sums.setdefault(name, _Sum(self.rnd.ids.shape[1]))
            weights = None if name.startswith(STATISTIC) else self.rnd.weights
            own.add(vector if weights is None else vector.mul_(weights[:, place : place + 1]))

    def reply(self) -> Any:
        """A reply whose vectors are the means, (runs, 1, n)."""
        complete = len(self.places) == self.rnd.ids.shape[1]
        rnd = self.rnd if complete else self.rnd.subset(np.array(self.places))
        means = {}
        for name, own in self.sums.items():
            alike = rnd.weights is None or name.startswith(STATISTIC)
            means[name] = own.total().div_(float(len(self.places)) if alike else rnd.share)
        return Bundle(**means)


class _Sum:
    def __init__(self, count: int) -> None:
        self.block_bits = max(4, math.ceil(math.log2(count)) // LEVELS)
        self.levels: list[Vector] = []
        self.tails: list[Vector] = []

    def add(self, row: Vector) -> None:
        self.tails.append(row[..., row.shape[-1] - row.shape[-1] % COLUMNS :].clone())
        self._add(0, row)
        mask, level = (1 << self.block_bits) - 1, 0
        while level + 1 < LEVELS and not (len(self.tails) >> self.block_bits * level) & mask:
            self._add(level + 1, self.levels[level])
            self.levels[level].zero_()
            level += 1

    def _add(self, level: int, row: Vector) -> None:
        if level < len(self.levels):
            self.levels[level].add_(row)
        else:  # the first row is the caller's to give away
            self.levels.append(row.clone() if level else row)

    def total(self) -> Vector:
        """Σ of the rows."""
        total, *others = self.levels
        for other in others:
            total.add_(other)
        tail = torch.cat(self.tails, 1).sum(1, keepdim=True)
        total[..., total.shape[-1] - tail.shape[-1] :] = tail
        return total
