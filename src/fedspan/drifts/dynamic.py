"""Dynamic regularization: a pull back to the server's model and a linear term per client (FedDyn, arXiv:2111.04263).

     1  α (y − x) − P h_i               added to local gradients
     2  v_i ← x − y                     sent, y the end point of the local steps
     3  h_i ← h_i + α Pᵀ v_i            outside the subspace h_i stays
     4  h ← h + α (|S|/N) Pᵀ mean_S v   keeps h = mean_i h_i over ALL clients
     5  x moves along mean_S v + P h/α

After exact local minimization h_i is ∇f_i(y). Where all y equal x, h_i = ∇f_i(x) and h = 0: the optimum. Line 5 is with
the h of line 4, as (1 + |S|/N) mean_S v + P h/α with the one before it. Clients may have weights w_i; then
h = Σ w_i h_i.
"""

from dataclasses import dataclass
from typing import Any

import torch

from fedspan import Bundle, Drift, Round, Vector, register
from fedspan.core.axes import Parts
from fedspan.core.errors import positive
from fedspan.core.objective import Plus
from fedspan.core.projector import LinearMap


@register
@dataclass(frozen=True)
class Dynamic(Drift):
    """A quadratic and a linear term, so that local minima agree with that of the mean loss."""

    alpha: float = (
        0.1  # α: strength of the pull back; of the order of the smoothness of the loss or less
    )

    follows_states = True
    controls = ("h",)

    def __post_init__(self) -> None:
        positive("alpha", self.alpha)

    def init_server(self, x0: Vector) -> Parts:
        return {"h": torch.zeros_like(x0)}

    init_client = init_server

    def begin(self, client: Bundle, down: Bundle, P: LinearMap, rnd: Round) -> Vector:
        own: Vector = P @ client.h
        return own

    def plus(self, work: Any, x: Vector, P: LinearMap) -> Plus:
        if P.whole:
            return lambda y: self.alpha * (y - x) - work  # 1
        return lambda z: self.alpha * z - work

    def after(self, client: Bundle, v: Vector, P: LinearMap, rnd: Round) -> Parts:
        return {"h": P.T.plus(self.alpha * v, client.h, rnd.overwrite)}  # 3

    def direction(self, server: Bundle, v: Vector, P: LinearMap, rnd: Round) -> Vector:
        along: Vector = (1 + rnd.share) * v + (P @ server.h) / self.alpha  # 5
        return along

    def server(self, server: Bundle, mean: Vector, up: Bundle, P: LinearMap, rnd: Round) -> Parts:
        return {"h": P.T.plus(self.alpha * rnd.share * mean, server.h, rnd.overwrite)}  # 4
