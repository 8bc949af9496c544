"""FedProx: federated averaging with a pull back to the server's model (Li et al. 2020, arXiv:1812.06127), Algorithm 2.

     1  send x to the clients in S
     2  y ← y − η_l (g_i(y) + μ (y − x))     K times, from y = x
     3  x ← x + η_g mean_S (y_i − x)

Line 2 is gradient descent on f_i(y) + (μ/2) ‖y − x‖². μ = 0 is FedAvg.

Differences from the paper: there each client solves its subproblem to an accuracy of its own, with any solver; here all
take K steps. There clients are sampled by weight and averaged uniformly; here they are sampled uniformly and averaged
by weight. A server step size η_g is added, which is 1 there.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedspan import Objective, Round, register
from fedspan.core.errors import not_negative
from fedspan.methods._averaging import Averaging, Down, ServerState, Up
from fedspan.methods.base import NoState


@register
@dataclass(frozen=True, kw_only=True)
class FedProx(Averaging):
    """Local steps that stay near the server's model."""

    uses_mean_only = True
    mu: float = 0.1  # μ: strength of the pull back to the server's model

    def __post_init__(self) -> None:
        super().__post_init__()
        not_negative("mu", self.mu)

    def client_step(
        self, client: NoState, down: Down, f: Objective, rnd: Round
    ) -> tuple[NoState, Up]:
        x = down.x
        direction = f.direction(plus=lambda y: self.mu * (y - x))
        y = self.descend(x, direction, self.rate(rnd))  # 2
        return client, Up(y.sub_(x))

    def server_step(self, server: ServerState, up: Up, rnd: Round) -> ServerState:
        return ServerState((self.server_lr * rnd.mean(up.dy)).add_(server.x))  # 3
