"""Yogi: v moves towards squared directions by a share of them, so that it falls slowly (arXiv:2003.00295).

2  v ← v − (1 − β_2) Δ² sign(v − Δ²)       elementwise; the other lines are in `_adaptive`
"""

from dataclasses import dataclass

import torch

from fedspan import Vector, register
from fedspan.servers.adam import Adam


@register
@dataclass(frozen=True)
class Yogi(Adam):
    """v falls slowly."""

    beta2: float = 0.99  # β_2: 1 − β_2 is the share of Δ² by which v moves

    def second_moment(self, v: Vector, square: Vector) -> Vector:
        return v - (1 - self.beta2) * square * torch.sign(v - square)
