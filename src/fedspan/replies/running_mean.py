"""The replies of a round that come one by one: kept, or averaged as they arrive, with one vector in memory.

The mean equals `Round.mean` of all replies to the last bit. Torch adds the rows of a matrix in blocks, and so does
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
    """The replies of a cohort, which come in its order; with `running` their mean alone is kept."""

    def __init__(self, rnd: Round, running: bool) -> None:
        self.rnd, self.running = rnd, running
        self.places: list[int] = []  # whose replies came
        self.ups: list[Any] = []
        self.levels: dict[str, list[Vector]] = {}  # of each vector: torch's partial sums
        self.tails: dict[str, list[Vector]] = {}  # and the last columns of all rows

    def add(self, place: int, up: Any) -> None:
        """Takes in the reply of one place, whose vectors it may change."""
        self.places.append(place)
        if not self.running:
            self.ups.append(up)
            return
        bits = max(4, math.ceil(math.log2(self.rnd.ids.shape[1])) // LEVELS)
        for name, row in vars(up).items():
            if self.rnd.weights is not None and not name.startswith(STATISTIC):
                row.mul_(self.rnd.weights[:, place : place + 1])
            tail = row[..., row.shape[-1] - row.shape[-1] % COLUMNS :].clone()
            self.tails.setdefault(name, []).append(tail)
            sums = self.levels.setdefault(name, [])
            for level in range(LEVELS):
                if level == len(sums):  # the first row is the caller's to give away
                    sums.append(row.clone() if level else row)
                else:
                    sums[level].add_(row)
                if level:
                    row.zero_()
                if (len(self.places) >> bits * level) % (1 << bits):
                    break
                row = sums[level]

    def reply(self) -> Any:
        """The replies as one, (runs, S, n), or their mean, (runs, 1, n)."""
        if not self.running:
            return wire.gather(self.ups)
        complete = len(self.places) == self.rnd.ids.shape[1]
        rnd = self.rnd if complete else self.rnd.subset(np.array(self.places))
        means = {}
        for name, (total, *others) in self.levels.items():
            for other in others:
                total.add_(other)
            tail = torch.cat(self.tails[name], 1).sum(1, keepdim=True)
            total[..., total.shape[-1] - tail.shape[-1] :] = tail
            alike = rnd.weights is None or name.startswith(STATISTIC)
            means[name] = total.div_(float(len(self.places)) if alike else rnd.share)
        return Bundle(**means)
