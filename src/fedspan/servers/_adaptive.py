"""The adaptive servers of Reddi et al. (2021, arXiv:2003.00295), Algorithm 2, which differ in line 2 only.

     1  m ← β_1 m + (1 − β_1) Δ
     2  v ← …                          from Δ², elementwise; starts at τ²
     3  x ← x − η_g m / (√v + τ)       Δ: the mean direction of the round

Inside a subspace that picks coordinates, lines 1 to 3 are about those coordinates, and the others stay. Inside any
other subspace line 1 is about P m, line 2 takes (PᵀΔ)², and √v becomes √((P∘P) v), the size of v along each row of P.
As in the paper's box, m and v have no bias correction; PyTorch's Adam and Flower's FedAdam have one.
"""

from abc import abstractmethod
from dataclasses import dataclass, field

import torch

from fedspan import Bundle, LinearMap, Parts, Round, Server, Vector
from fedspan.core.errors import below_one, positive


@dataclass(frozen=True)
class Adaptive(Server):
    """A server that divides each coordinate by the size of its past changes."""

    lr: float = field(default=0.01, kw_only=True)  # η_g: about how far a coordinate moves per round
    beta1: float = 0.9  # β_1: momentum
    tau: float = 1e-3  # τ: changes much smaller than this are not enlarged

    def __post_init__(self) -> None:
        super().__post_init__()
        below_one("beta1", self.beta1)
        positive("tau", self.tau)

    def init(self, x0: Vector) -> Parts:
        return {"m": torch.zeros_like(x0), "v": torch.full_like(x0, self.tau**2)}

    def step(
        self, server: Bundle, direction: Vector, P: LinearMap, rnd: Round, each: Vector
    ) -> tuple[Vector, Parts]:
        m = self.beta1 * (P @ server.m) + (1 - self.beta1) * direction  # 1
        if P.picks:
            inside = self.second_moment(P @ server.v, direction**2)  # 2
            v = P.T.put(inside, server.v)
        else:
            v = self.second_moment(server.v, (P.T @ direction) ** 2)  # 2
            inside = P.squared(v)
        return self.lr * m / (inside.sqrt() + self.tau), {"m": P.T.put(m, server.m), "v": v}  # 3

    @abstractmethod
    def second_moment(self, v: Vector, square: Vector) -> Vector:
        """Return v after this round's Δ²."""
