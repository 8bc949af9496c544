"""SubAvg: federated averaging inside the shared random subspace; SSF without its controls, as an ablation.

1  P ← projector(seed, t)                 server and clients
2  send what i lacks of x
3  z ← z − η_l P ∇f_i(x + Pᵀz; ξ)         K times, from z = 0;  send z_i
4  x ← x + η_g Pᵀ mean_S z_i

`_server_side` describes momentum, extrapolation and compression on the server, `_preconditioner` a scale of local steps
that all clients share.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedspan import Layout, Log, ModelSync, Objective, Restorable, Round, Vector, register
from fedspan.methods._preconditioner import Preconditioned, Scaled
from fedspan.methods.base import LoggedModel, ProbedDown


@dataclass(frozen=True, eq=False)
class ServerState(LoggedModel):
    """The model, its log and momentum, and what a compressed download has left out so far."""

    e: Vector
    v: Vector  # mean squares of the rows of mean gradients, for the preconditioner


@dataclass(frozen=True, eq=False)
class Down(ProbedDown):
    """What the client lacks of x, one number to check P, and the preconditioner if there is one."""

    v: Vector | None = None


@dataclass(frozen=True, eq=False)
class ClientState:
    """The optimizer's moments if they are kept; empty otherwise."""

    moments: Vector


@dataclass(frozen=True, eq=False)
class Up:
    """r numbers."""

    z: Vector


@register
@dataclass(frozen=True, kw_only=True)
class SubAvg(Preconditioned[ServerState, ClientState, Down, Up], Restorable[ClientState, Down, Up]):
    """r numbers per message, and no drift correction."""

    uses_mean_only = True

    def init_server(self, x0: Vector, layout: Layout) -> ServerState:
        return ServerState(
            x0, Log(), self.no_velocity(x0), self.nothing_unsent(x0), self.no_squares(x0, layout)
        )

    def init_client(self, x0: Vector, layout: Layout) -> ClientState:
        return ClientState(self.no_moments(x0, layout))

    def broadcast(self, server: ServerState, rnd: Round) -> Down:
        P = self.subspace(rnd)  # 1
        v = server.v if self.scaled else None
        return Down(ModelSync.of(server.x, server.log, rnd), P.probe, v)  # 2

    def client_step(
        self, client: ClientState, down: Down, f: Objective, rnd: Round
    ) -> tuple[ClientState, Up]:
        P, x = self.subspace(rnd), down.sync.model  # 1
        P.agree(down.probe)
        grad = f.restrict(x, P)
        steps = Scaled(grad, self.scales(down.v, P)) if self.scaled else grad
        z, moments = self.descend_inside(x, P, steps, client.moments, rnd)  # 3
        return ClientState(moments), Up(z)

    def update_client_state(
        self, client: ClientState, down: Down, up: Up, rnd: Round
    ) -> ClientState:
        return client

    def server_step(self, server: ServerState, up: Up, rnd: Round) -> ServerState:
        P = self.subspace(rnd)
        mean_z, v = rnd.mean(up.z), server.v
        if self.scaled:
            v = self.squares(
                v, mean_z / (-self.step(P, rnd) * self.local_steps * self.scales(v, P)), P
            )
        delta = self.server_lr * mean_z
        if self.extrapolate:
            delta = delta * self.stretch(up.z, rnd)
        entry, move, m, e = self.move(server.m, server.e, delta, P, rnd)
        return ServerState(
            P.T.plus(move, server.x), self.push(server.log, entry, rnd), m, e, v
        )  # 4
