"""Aggregators as values: how the replies of a round become one, in place of their plain mean.

All vectors of a client's reply are one vector here, one after the other. What an aggregator returns takes the place of
the mean at the server; every client's own state still follows from its own reply.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from fedspan.core.layout import Vector

if TYPE_CHECKING:
    from fedspan.core.round import Round


@dataclass(frozen=True, kw_only=True)
class Aggregator(ABC):
    """A map from the replies of a round to one vector. The order of the replies has no effect."""

    bounded: ClassVar[bool] = True  # whether one reply has a bounded influence
    translates: ClassVar[bool] = True  # a vector added to each reply adds to the result

    @abstractmethod
    def combine(self, v: Vector, rnd: Round) -> Vector:
        """What stands for the mean of the replies.

        Args:
            v: (runs, clients, n) replies.
            rnd: The round of the clients that replied; `rnd.mean(v)` is the mean by their weights.

        Returns:
            (runs, 1, n) numbers.
        """


def sizes(v: Vector) -> Tensor:
    """‖v_i‖ of each reply, (runs, clients, 1); in float64, in which no square of a float32 overflows."""
    found: Tensor = torch.linalg.vector_norm(v, dim=-1, keepdim=True, dtype=torch.float64)
    return found


def middle(v: Tensor) -> Tensor:
    """The median over the clients, coordinate by coordinate; of an even number the mean of the middle two."""
    ordered, count = v.sort(1).values, v.shape[1]
    return ordered[:, (count - 1) // 2 : count // 2 + 1].mean(1, keepdim=True)


def clipped(v: Vector, most: Tensor | float) -> Vector:
    """The replies, those of a larger norm shortened to `most`."""
    return v * (most / sizes(v).clamp(min=1e-300)).clamp(max=1.0).to(v.dtype)
