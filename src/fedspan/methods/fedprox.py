"""FedProx: federated averaging with a pull back to the server's model (Li et al. 2020, arXiv:1812.06127), Algorithm 2.

     1  send x to the clients in S
     2  y ← y − η_l (g_i(y) + μ (y − x))     K times, from y = x
     3  x ← x + η_g mean_S (y_i − x)

Line 2 is gradient descent on f_i(y) + (μ/2) ‖y − x‖². μ = 0 is FedAvg.

Differences from the paper: it lets each client solve its subproblem to an accuracy of its own, with any solver; here
all take K steps. It draws clients by their weights and averages them alike; here they are drawn alike and averaged by
their weights. A server step η_g is added, 1 there.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedspan.core.errors import not_negative
from fedspan.core.method import Round
from fedspan.core.objective import Objective
from fedspan.core.registry import register
from fedspan.methods._averaging import Averaging, Down, ServerState, Up
from fedspan.methods.base import NoState


@register
@dataclass(frozen=True, kw_only=True)
class FedProx(Averaging):
    """Local steps that do not stray far."""

    mu: float = 0.1  # μ

    def __post_init__(self) -> None:
        super().__post_init__()
        not_negative("mu", self.mu)

    def client_step(self, client: NoState, down: Down, f: Objective, rnd: Round) -> tuple[NoState, Up]:
        x = down.x
        direction = f.direction(plus=lambda y: self.mu * (y - x))
        y = self.descend(x, direction, self.rate(rnd.t))  # 2
        return client, Up(y - x)

    def server_step(self, server: ServerState, up: Up, rnd: Round) -> ServerState:
        return ServerState(server.x + self.server_lr * rnd.mean(up.dy))  # 3
