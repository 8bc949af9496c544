"""FedYogi: federated averaging with Yogi on the server (Reddi et al. 2021, arXiv:2003.00295), Algorithm 2.

     1  send x to the clients in S
     2  y ← y − η_l g_i(y)                         K times, from y = x
     3  Δ ← mean_S (y_i − x)
     4  m ← β_1 m + (1 − β_1) Δ
     5  v ← v − (1 − β_2) Δ² sign(v − Δ²)          elementwise, from v = τ²
     6  x ← x + η_g m / (√v + τ)

All but line 5 is in `_averaging`. Differences from the paper: none known.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedspan import Vector, register
from fedspan.core.errors import below_one
from fedspan.methods._averaging import Adaptive


@register
@dataclass(frozen=True, kw_only=True)
class FedYogi(Adaptive):
    """v moves towards Δ² by a share of Δ², so that it falls slowly."""

    beta2: float = 0.99  # β_2: 1 − β_2 is the share of Δ² by which v moves

    def __post_init__(self) -> None:
        super().__post_init__()
        below_one("beta2", self.beta2)

    def second_moment(self, v: Vector, square: Vector) -> Vector:
        return v - (1 - self.beta2) * square * torch.sign(v - square)  # 5
