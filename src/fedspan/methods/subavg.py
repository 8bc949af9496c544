"""SubAvg: federated averaging inside the shared random subspace; SSF without its controls, as an ablation.

1  P ← projector(seed, t)                 both ends
2  send what i lacks of x
3  z ← z − η_l P ∇f_i(x + Pᵀz; ξ)         K times, from z = 0;  send z_i
4  x ← x + η_g Pᵀ mean_S z_i
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedspan.core.layout import Layout, Vector
from fedspan.core.method import Restorable, Round
from fedspan.core.objective import Objective
from fedspan.core.registry import register
from fedspan.core.sync import Log, ModelSync, SyncedDown
from fedspan.methods.base import InSubspace


@dataclass(frozen=True, eq=False)
class ServerState:
    """The model and its last changes."""

    x: Vector
    log: Log


@dataclass(frozen=True, eq=False)
class ClientState:
    """The optimizer's moments if they are kept; empty otherwise."""

    moments: Vector


@dataclass(frozen=True, eq=False)
class Down(SyncedDown):
    """What the client lacks of x, and one number to check P."""

    probe: torch.Tensor


@dataclass(frozen=True, eq=False)
class Up:
    """r numbers."""

    z: Vector


@register
@dataclass(frozen=True, kw_only=True)
class SubAvg(InSubspace[ServerState, ClientState, Down, Up], Restorable[ClientState, Down, Up]):
    """r numbers per message, and no drift correction."""

    def init_server(self, x0: Vector, layout: Layout) -> ServerState:
        return ServerState(x0, Log())

    def init_client(self, x0: Vector, layout: Layout) -> ClientState:
        return ClientState(self.no_moments(x0, layout))

    def broadcast(self, server: ServerState, rnd: Round) -> Down:
        P = self.subspace(rnd)  # 1
        return Down(ModelSync(server.x, server.log, rnd.last_round), P.probe)  # 2

    def client_step(self, client: ClientState, down: Down, f: Objective, rnd: Round) -> tuple[ClientState, Up]:
        P, x = self.subspace(rnd), down.sync.model  # 1
        P.agree(down.probe)
        grad = f.restrict(x, P)
        z, moments = self.descend_inside(x, P, grad, client.moments, rnd)  # 3
        return ClientState(moments), Up(z)

    def update_client_state(self, client: ClientState, down: Down, up: Up, rnd: Round) -> ClientState:
        return client

    def server_step(self, server: ServerState, up: Up, rnd: Round) -> ServerState:
        delta = self.server_lr * rnd.mean(up.z)
        x = server.x + self.subspace(rnd).T @ delta  # 4
        return ServerState(x, self.push(server.log, delta, rnd))
