"""EF21: compressed changes of an estimate of each client's gradient (Richtárik et al. 2021, arXiv:2106.05203).

    q ← C(P ḡ_i − P h_i), sent;   h_i ← h_i + Pᵀ q
    h ← h + (|S|/N) Pᵀ mean_S q                                keeps h = mean_i h_i over ALL clients

P h takes the place of the mean of the replies. C must be contractive, as top-k is. P ḡ_i is −z/(η_l K), also after
steps that are not plain: the estimate is then that of their mean direction.
"""

from dataclasses import dataclass

import torch

from fedspan import Bundle, LinearMap, Parts, Round, Vector, register
from fedspan.uplinks._compressed import Compressed


@register
@dataclass(frozen=True)
class EF21(Compressed):
    """Contractive compression of the change of a gradient estimate."""

    in_gradients = follows_states = True  # h = mean h_i
    needs_no_controls = (
        "its estimates h_i and controls would be the same thing twice; use uplink = 'code'"
    )

    def init_client(self, x0: Vector) -> Parts:
        return {"h": torch.zeros_like(x0)}

    init_server = init_client

    def send(self, v: Vector, client: Bundle, P: LinearMap) -> tuple[Vector, Parts]:
        return v - P @ client.h, {}

    def after(self, client: Bundle, v: Vector, P: LinearMap) -> Parts:
        return {"h": P.T.plus(v, client.h)}

    def mean(self, server: Bundle, v: Vector, P: LinearMap, rnd: Round) -> tuple[Vector, Parts]:
        h = P.T.plus(rnd.share * rnd.mean(v), server.h)
        return P @ h, {"h": h}
