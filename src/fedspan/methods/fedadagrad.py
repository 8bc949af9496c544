"""FedAdagrad: federated averaging with Adagrad on the server (Reddi et al. 2021, arXiv:2003.00295), Algorithm 2.

     1  send x to the clients in S
     2  y ← y − η_l g_i(y)             K times, from y = x
     3  Δ ← mean_S (y_i − x)
     4  m ← β_1 m + (1 − β_1) Δ
     5  v ← v + Δ²                     elementwise, from v = τ²
     6  x ← x + η_g m / (√v + τ)

All but line 5 is in `_averaging`. As in the paper's experiments, β_1 is 0 by default.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedspan import Vector, register
from fedspan.methods._averaging import Adaptive


@register
@dataclass(frozen=True, kw_only=True)
class FedAdagrad(Adaptive):
    """v only grows, so that steps only get shorter."""

    beta1: float = 0.0  # β_1: momentum of the server

    def second_moment(self, v: Vector, square: Vector) -> Vector:
        return v + square  # 5
