"""What FedAvg's family shares: model and change are sent in full, and clients keep nothing between rounds.

     1  send x to the clients in S
     2  y ← y − η_l g_i(y)             K times, from y = x;  send Δ_i = y − x

What the server does with Δ = mean_S Δ_i is in the file of each method. `Adaptive` is the server of Reddi et al.
(2021, arXiv:2003.00295), Algorithm 2, whose members differ only in line 5:

     4  m ← β_1 m + (1 − β_1) Δ
     5  v ← …                          from Δ², elementwise; starts at τ²
     6  x ← x + η_g m / (√v + τ)
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch

from fedspan import Layout, Objective, Round, Vector
from fedspan.core.errors import below_one, positive
from fedspan.methods.base import LocalSteps, NoState


@dataclass(frozen=True, eq=False)
class ServerState:
    """The model, and the moments of Δ if the server keeps any."""

    x: Vector
    m: Vector | None = None
    v: Vector | None = None


@dataclass(frozen=True, eq=False)
class Down:
    """d numbers."""

    x: Vector


@dataclass(frozen=True, eq=False)
class Up:
    """d numbers."""

    dy: Vector


@dataclass(frozen=True, kw_only=True)
class Averaging(LocalSteps[ServerState, NoState, Down, Up]):
    """Local steps from the server's model; a method says what becomes of their mean."""

    def init_server(self, x0: Vector, layout: Layout) -> ServerState:
        return ServerState(x0)

    def init_client(self, x0: Vector, layout: Layout) -> NoState:
        return NoState()

    def broadcast(self, server: ServerState, rnd: Round) -> Down:
        return Down(server.x)  # 1

    def client_step(
        self, client: NoState, down: Down, f: Objective, rnd: Round
    ) -> tuple[NoState, Up]:
        y = self.descend(down.x, f.direction(), self.rate(rnd))  # 2
        return client, Up(y.sub_(down.x))


@dataclass(frozen=True, kw_only=True)
class Adaptive(Averaging):
    """A server that divides each coordinate by the size of its past changes."""

    uses_mean_only = True
    server_lr: float = 0.01  # η_g: about how far a coordinate moves per round
    beta1: float = 0.9  # β_1: momentum of the server
    tau: float = 1e-3  # τ: changes much smaller than this are not enlarged

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
        """Line 5: v after this round's Δ²."""
