"""What FedAvg's family shares: the model goes down whole, its change comes up whole, clients remember nothing.

     1  send x to the clients in S
     2  y ← y − η_l g_i(y)             K times, from y = x;  send Δ_i = y − x

What the server makes of Δ = mean_S Δ_i stands in each method's own file. `Adaptive` is the server of Reddi et al.
(2021, arXiv:2003.00295), Algorithm 2, whose members differ in line 5 alone:

     4  m ← β_1 m + (1 − β_1) Δ
     5  v ← …                          from Δ², elementwise; starts at τ²
     6  x ← x + η_g m / (√v + τ)
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch

from fedspan.core.errors import below_one, positive
from fedspan.core.layout import Layout, Vector
from fedspan.core.method import Round
from fedspan.core.objective import Objective
from fedspan.methods.base import LocalSteps


@dataclass(frozen=True, eq=False)
class ServerState:
    """The model, and the moments of Δ where the server keeps any."""

    x: Vector
    m: Vector | None = None
    v: Vector | None = None


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


@dataclass(frozen=True, kw_only=True)
class Averaging(LocalSteps[ServerState, ClientState, Down, Up]):
    """Plain local steps; the method says what becomes of their mean."""

    def init_server(self, x0: Vector, layout: Layout) -> ServerState:
        return ServerState(x0)

    def init_client(self, x0: Vector, layout: Layout) -> ClientState:
        return ClientState()

    def broadcast(self, server: ServerState, rnd: Round) -> Down:
        return Down(server.x)  # 1

    def client_step(self, client: ClientState, down: Down, f: Objective, rnd: Round) -> tuple[ClientState, Up]:
        y = self.descend(down.x, f.direction(), self.rate(rnd.t))  # 2
        return client, Up(y - down.x)

    def settle(self, client: ClientState, down: Down, up: Up, rnd: Round) -> ClientState:
        return client


@dataclass(frozen=True, kw_only=True)
class Adaptive(Averaging):
    """A server that scales every coordinate by what its changes have been."""

    server_lr: float = 0.01  # η_g: about how far a coordinate goes in a round
    beta1: float = 0.9  # β_1
    tau: float = 1e-3  # τ: changes well below it are not scaled up

    def __post_init__(self) -> None:
        super().__post_init__()
        below_one("beta1", self.beta1)
        positive("tau", self.tau)

    def init_server(self, x0: Vector, layout: Layout) -> ServerState:
        return ServerState(x0, torch.zeros_like(x0), torch.full_like(x0, self.tau**2))

    def server_step(self, server: ServerState, up: Up, rnd: Round) -> ServerState:
        assert server.m is not None
        assert server.v is not None
        delta = rnd.mean(up.dy)  # 3
        m = self.beta1 * server.m + (1 - self.beta1) * delta  # 4
        v = self.second_moment(server.v, delta**2)  # 5
        return ServerState(server.x + self.server_lr * m / (v.sqrt() + self.tau), m, v)  # 6

    @abstractmethod
    def second_moment(self, v: Vector, square: Vector) -> Vector:
        """Line 5: v with this round's Δ² taken in."""
