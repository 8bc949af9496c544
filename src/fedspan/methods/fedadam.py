"""FedAdam: federated averaging with Adam on the server (Reddi et al. 2021, arXiv:2003.00295), Algorithm 2.

     1  send x to the clients in S
     2  y ← y − η_l g_i(y)             K times, from y = x
     3  Δ ← mean_S (y_i − x)
     4  m ← β_1 m + (1 − β_1) Δ
     5  v ← β_2 v + (1 − β_2) Δ²       elementwise, from v = τ²
     6  x ← x + η_g m / (√v + τ)

All but line 5 is in `_averaging`.

Differences from the paper: none known. As in its box, m and v have no bias correction; PyTorch's Adam and Flower's
FedAdam have one.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedspan import Vector, register
from fedspan.core.errors import below_one
from fedspan.methods._averaging import Adaptive


@register
@dataclass(frozen=True, kw_only=True)
class FedAdam(Adaptive):
    """v is an exponential mean of Δ²."""

    beta2: float = 0.99  # β_2: decay of v per round

    def __post_init__(self) -> None:
        super().__post_init__()
        below_one("beta2", self.beta2)

    def second_moment(self, v: Vector, square: Vector) -> Vector:
        return self.beta2 * v + (1 - self.beta2) * square  # 5
