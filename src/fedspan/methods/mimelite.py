"""MimeLite: local steps with the statistics of a server optimizer, frozen in the round (Karimireddy et al. 2021).

     1  send (x, s) to the clients in S
     2  y ← y − η_l U(g_i(y), s)                  K times, from y = x
     3  send y and ∇f_i(x), a gradient on all of a client's data
     4  x ← x + η_g mean_S (y_i − x)
     5  s ← V(mean_S ∇f_i(x), s)

The server's optimizer is momentum: s = m, and U(g, s) = V(g, s) = (1 − β_1) g + β_1 m. Every client mimics the step
that it would take, and no statistic drifts with a client's data.

Differences from the paper (arXiv:2008.03606): `mime`, whose steps follow g_i(y; ζ) − g_i(x; ζ) + mean_S ∇f_j(x), is
not offered: it needs a second exchange in each round and two gradients on each mini-batch. Nor is Adam as the server's
optimizer. A server step size η_g is added, which is 1 there. Clients may have weights.
"""

from dataclasses import dataclass

import torch

from fedspan import Bundle, Layout, Objective, Round, Vector, register
from fedspan.core.errors import below_one, positive
from fedspan.methods.base import LocalSteps


@register
@dataclass(frozen=True, kw_only=True)
class MimeLite(LocalSteps):
    """A server optimizer whose steps the clients take."""

    beta1: float = 0.9  # β_1: weight of the past mean gradients
    server_lr: float = 1.0  # η_g: step size of the server

    plain_sum = True

    def __post_init__(self) -> None:
        super().__post_init__()
        below_one("beta1", self.beta1)
        positive("server_lr", self.server_lr)
        self.needs_plain_steps("steps are those of the server's momentum")

    def init_server(self, x0: Vector, layout: Layout) -> Bundle:
        return Bundle(x=x0, m=torch.zeros_like(x0))

    def init_client(self, x0: Vector, layout: Layout) -> Bundle:
        return Bundle()

    def broadcast(self, server: Bundle, rnd: Round) -> Bundle:
        return server  # 1

    def client_step(
        self, client: Bundle, down: Bundle, f: Objective, rnd: Round
    ) -> tuple[Bundle, Bundle]:
        x, lr = down.x, (1 - self.beta1) * self.rate(rnd)
        full = f.full_grad(x)
        y = self.descend(x, f.direction(self.beta1 / (1 - self.beta1) * down.m), lr)  # 2
        return client, Bundle(v=x - y, g=full)  # 3

    def server_step(self, server: Bundle, up: Bundle, rnd: Round) -> Bundle:
        x = server.x - self.server_lr * rnd.mean(up.v)  # 4
        m = self.beta1 * server.m + (1 - self.beta1) * rnd.mean(up.g)  # 5
        return server.replace(x=x, m=m)
