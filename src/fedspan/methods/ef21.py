"""EF21: clients send compressed changes of an estimate of their gradient (Richtárik et al. 2021, arXiv:2106.05203).

     1  send x to the clients in S
     2  y ← y − η_l g_i(y)                K times, from y = x;  D_i ← x − y
     3  q_i ← C(D_i/(η_l K) − h_i);  send q_i
     4  h_i ← h_i + q_i
     5  h ← h + (|S|/N) mean_S q_i        keeps h = mean_i h_i over ALL clients
     6  x ← x − γ h,   γ = η_g η_l K

C must be contractive, as top-k is. Differences from the paper: K local steps, whose mean gradient D_i/(η_l K) replaces
∇f_i(x), and h starts at zero. Client sampling is that of EF21-PP (arXiv:2110.03294). Clients may have weights w_i; then
h = Σ w_i h_i. After a lost reply the client returns to the h_i it had, and h does not change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedspan import Layout, Objective, Restorable, Round, Vector, register
from fedspan.methods._coded import Coded, Up
from fedspan.methods.base import FullModel


@dataclass(frozen=True, eq=False)
class ServerState:
    """The model and the mean of all estimates."""

    x: Vector
    h: Vector


@dataclass(frozen=True, eq=False)
class ClientState:
    """The estimate of the client's gradient."""

    h: Vector


@register
@dataclass(frozen=True, kw_only=True)
class EF21(Coded[ServerState, ClientState, FullModel], Restorable[ClientState, FullModel, Up]):
    """Contractive compression of the change of a gradient estimate."""

    needs = "contractive"

    @property
    def follows_states(self) -> bool:
        """Line 5 does: h = mean h_i."""
        return True

    def init_server(self, x0: Vector, layout: Layout) -> ServerState:
        return ServerState(x0, torch.zeros_like(x0))

    def init_client(self, x0: Vector, layout: Layout) -> ClientState:
        return ClientState(torch.zeros_like(x0))

    def broadcast(self, server: ServerState, rnd: Round) -> FullModel:
        return FullModel(server.x)  # 1

    def client_step(
        self, client: ClientState, down: FullModel, f: Objective, rnd: Round
    ) -> tuple[ClientState, Up]:
        g = self.moved(down.x, f, rnd) / (self.rate(rnd) * self.local_steps)  # 2
        up = Up(self.encode(g - client.h, rnd))  # 3
        return self.update_client_state(client, down, up, rnd), up

    def update_client_state(
        self, client: ClientState, down: FullModel, up: Up, rnd: Round
    ) -> ClientState:
        return ClientState(client.h + self.decode(up.q, rnd))  # 4

    def server_step(self, server: ServerState, up: Up, rnd: Round) -> ServerState:
        h = server.h + rnd.share * rnd.mean(self.decode(up.q, rnd))  # 5
        return ServerState(
            server.x - self.server_lr * self.rate(rnd) * self.local_steps * h, h
        )  # 6
