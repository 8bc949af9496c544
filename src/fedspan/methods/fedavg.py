"""FedAvg: federated averaging of plain local steps (McMahan et al. 2017, arXiv:1602.05629).

     1  send x to the clients in S
     2  y ← y − η_l g_i(y)             K times, from y = x
     3  x ← x + η_g mean_S (y_i − x)

Differences from the paper: a server step η_g, which is 1 there.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedspan.core.layout import Layout, Vector
from fedspan.core.method import Round
from fedspan.core.objective import Objective
from fedspan.core.registry import register
from fedspan.methods._local import LocalSteps, descend


@dataclass(frozen=True, eq=False)
class ServerState:
    """The model."""

    x: Vector


@dataclass(frozen=True, eq=False)
class ClientState:
    """Clients remember nothing."""


@dataclass(frozen=True, eq=False)
class Down:
    """d numbers."""

    x: Vector


@dataclass(frozen=True, eq=False)
class Up:
    """d numbers."""

    dy: Vector


@register
@dataclass(frozen=True, kw_only=True)
class FedAvg(LocalSteps[ServerState, ClientState, Down, Up]):
    """Average of local models."""

    def init_server(self, x0: Vector, layout: Layout) -> ServerState:
        return ServerState(x0)

    def init_client(self, x0: Vector, layout: Layout) -> ClientState:
        return ClientState()

    def broadcast(self, server: ServerState, rnd: Round) -> Down:
        return Down(server.x)  # 1

    def client_step(self, client: ClientState, down: Down, f: Objective, rnd: Round) -> tuple[ClientState, Up]:
        y = descend(down.x, f.direction(), self.rate(rnd.t), self.local_steps, self.momentum)  # 2
        return client, Up(y - down.x)

    def settle(self, client: ClientState, down: Down, up: Up, rnd: Round) -> ClientState:
        return client

    def server_step(self, server: ServerState, up: Up, rnd: Round) -> ServerState:
        return ServerState(server.x + self.server_lr * rnd.mean(up.dy))  # 3
