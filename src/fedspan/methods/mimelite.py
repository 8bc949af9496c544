"""MimeLite: local steps with the statistics of a server optimizer, frozen in the round (Karimireddy et al. 2021).

     1  send (x, s) to the clients in S
     2  y ← y − η_l U(g_i(y), s)                  K times, from y = x
     3  send y and ∇f_i(x), a gradient on all of a client's data
     4  x ← x + η_g mean_S (y_i − x)
     5  s ← V(mean_S ∇f_i(x), s)

base = "momentum", s = m:      U = (1 − β_1) g + β_1 m;                   V: m ← (1 − β_1) g + β_1 m
base = "adam", s = (m, v):     U = ((1 − β_1) g + β_1 m)/(√v + ε);        V: the same m, and v ← (1 − β_2) g² + β_2 v

Every client mimics the step that the server's optimizer would take, and no statistic drifts with a client's data.

Differences from the paper (arXiv:2008.03606): `mime`, whose steps follow g_i(y; ζ) − g_i(x; ζ) + mean_S ∇f_j(x), is
not offered: it needs a second exchange in each round and two gradients on each mini-batch. v starts as the first mean
gradient's square, coordinate by coordinate, and a coordinate without one does not move: in the paper v starts at zero
and first steps are 1/ε times a gradient. A server step size η_g is added, which is 1 there. Clients may have weights.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from fedspan import Bundle, Layout, Objective, Round, Vector, register
from fedspan.core.errors import below_one, positive
from fedspan.methods.base import LocalSteps


@register
@dataclass(frozen=True, kw_only=True)
class MimeLite(LocalSteps):
    """A server optimizer whose steps the clients take."""

    base: Literal["momentum", "adam"] = "momentum"  # the optimizer whose statistics clients use
    beta1: float = 0.9  # β_1: weight of the past mean gradients
    beta2: float = 0.99  # β_2: the same of their squares, for "adam"
    eps: float = 1e-3  # ε: coordinates with smaller gradients are not enlarged further, for "adam"
    server_lr: float = 1.0  # η_g: step size of the server

    plain_sum = True

    def __post_init__(self) -> None:
        super().__post_init__()
        below_one("beta1", self.beta1)
        below_one("beta2", self.beta2)
        positive("eps", self.eps)
        positive("server_lr", self.server_lr)
        self.needs_plain_steps("`base` is the optimizer of its local steps")

    def init_server(self, x0: Vector, layout: Layout) -> Bundle:
        zeros = torch.zeros_like(x0)
        return Bundle(x=x0, m=zeros, v=zeros.clone() if self.base == "adam" else None)

    def init_client(self, x0: Vector, layout: Layout) -> Bundle:
        return Bundle()

    def broadcast(self, server: Bundle, rnd: Round) -> Bundle:
        return server  # 1

    def client_step(
        self, client: Bundle, down: Bundle, f: Objective, rnd: Round
    ) -> tuple[Bundle, Bundle]:
        x, lr = down.x, (1 - self.beta1) * self.rate(rnd)
        full = f.full_grad(x)
        along = f.direction(self.beta1 / (1 - self.beta1) * down.m)
        if (v := down.get("v")) is not None:
            D = torch.where(v > 0, 1 / (v.sqrt() + self.eps), 0.0)
            y = self.descend(x, lambda y: D * along(y), lr)  # 2
        else:
            y = self.descend(x, along, lr)  # 2
        return client, Bundle(v=x - y, g=full)  # 3

    def server_step(self, server: Bundle, up: Bundle, rnd: Round) -> Bundle:
        x, g, v = server.x - self.server_lr * rnd.mean(up.v), rnd.mean(up.g), server.get("v")  # 4
        if v is not None:
            v = torch.where(v > 0, self.beta2 * v + (1 - self.beta2) * g * g, g * g)  # 5
        return server.replace(x=x, m=self.beta1 * server.m + (1 - self.beta1) * g, v=v)
