"""Momentum on the server (Hsu et al. 2019, arXiv:1909.06335), inside the subspace of each round.

    P m ← β P m + direction;   x ← x − η_g Pᵀ P m                 outside the subspace m and x stay

In the long run a step goes 1/(1 − β) times as far as without momentum. A round without replies changes neither x nor
m. With a compressed downlink P m is what was sent of it.
"""

from dataclasses import dataclass

import torch

from fedspan import Bundle, LinearMap, Parts, Round, Server, Vector, register
from fedspan.core.errors import below_one


@register
@dataclass(frozen=True)
class Momentum(Server):
    """Each round moves x along the directions of the rounds before it too."""

    beta: float = 0.9  # β: weight of the past direction

    def __post_init__(self) -> None:
        super().__post_init__()
        below_one("beta", self.beta)

    def init(self, x0: Vector) -> Parts:
        return {"m": torch.zeros_like(x0)}

    def step(
        self, server: Bundle, direction: Vector, P: LinearMap, rnd: Round, each: Vector
    ) -> tuple[Vector, Parts]:
        now = self.beta * (P @ server.m) + direction
        return now if self.lr == 1 else self.lr * now, {"m": P.T.put(now, server.m)}

    def sent(self, parts: Parts, move: Vector, sent: Vector, P: LinearMap) -> Parts:
        return {"m": P.T.plus((sent - move) / self.lr, parts["m"])}
