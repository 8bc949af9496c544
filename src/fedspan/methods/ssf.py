"""SSF: SCAFFOLD inside a random subspace that all parties draw from a shared seed (arXiv:2604.25467), Algorithm 1.

     1  P ← projector(seed, t)                       server and clients; only the seed is shared
     2  send what i lacks of x, and P c              r numbers each
     3  u ← P c − P c_i;  z ← 0
     4  z ← z − η_l (P ∇f_i(x + Pᵀz; ξ) + u)         K times
     5  a_i ← −z/(η_l K) − P c                       ( = P ḡ_i − P c_i );  send a_i
     6  c_i ← c_i + Pᵀ a_i                           backfill: outside the subspace c_i stays
     7  x ← x − η_g η_l K Pᵀ(P c + mean_S a_i)       backfill of the model
     8  c ← c + (|S|/N) Pᵀ mean_S a_i                keeps c = mean_i c_i over ALL clients
    8'  c ← c + Pᵀ(mean_S P ḡ_i − P c)               control = "paper"

With a `compressor` C, line 5 sends C(a_i), and lines 6 to 8 use C(a_i) instead of a_i at the server and at the client,
so that c = mean c_i still holds. c_i then is the memory of an error feedback: what C left out of a_i is missing from
c_i too, and so is part of the client's next a_i. A second memory would count it twice; there is none. C must be
contractive, as top-k is, and QSGD with many levels: an unbiased C with ω ≥ 1 would add more error than it removes.

Near the optimum a_i is mostly the noise of this round's mini-batches, and so is what C leaves out of it. With `beta`
below 1 the client keeps a running mean v_i of its gradients, as u_i = v_i − c_i, and compresses u_i:

    5'  P u_i ← (1 − β) P u_i + β (−z/(η_l K) − P c);  a_i ← C(P u_i), sent;  u_i ← u_i − Pᵀ a_i

Outside the subspace u_i stays, as c_i does. This is momentum for error feedback with noisy gradients (Fatkhullin et
al. 2023, arXiv:2305.15155), and with P = I it is SCAFCOM. It costs the client d more numbers of its own memory.

Momentum or another optimizer works on the corrected gradient of line 4. a_i stays P ḡ_i − P c_i, from the mean of the
gradients themselves, so that c = mean c_i still holds. z no longer follows from a_i and is sent too, and line 7 becomes
x ← x + η_g Pᵀ mean_S z. `moments` says what becomes of the optimizer's memory between two rounds of a client.

Differences from the paper: its box has no client sampling. Read literally under sampling it is line 8', which breaks
c = mean c_i and needs P ḡ_i on the uplink as well (2r numbers); it is offered because the paper's tables were made
with it. With full participation 8 and 8' are the same. Clients may have weights w_i; then c = Σ w_i c_i.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from fedspan import Compressor, Encoded, Layout, Objective, Replayable, Round, SpecError, Vector, register
from fedspan.core.errors import one_of, positive_share
from fedspan.core.projector import LinearMap
from fedspan.core.sync import Log, ModelSync, SyncedDown
from fedspan.methods.base import Averaged, InSubspace


@dataclass(frozen=True, eq=False)
class ServerState:
    """The model, the mean of all controls, and the last changes of the model."""

    x: Vector
    c: Vector
    log: Log


@dataclass(frozen=True, eq=False)
class ClientState:
    """The client's control, d numbers in its own memory, never sent; the other fields are empty by default."""

    c: Vector
    u: Vector  # v_i − c_i; empty if β = 1
    moments: Vector  # of the optimizer; empty if they are reset


@dataclass(frozen=True, eq=False)
class Down(SyncedDown):
    """What the client lacks of x, r numbers of control, and one number to check P."""

    Pc: Vector
    probe: torch.Tensor


@dataclass(frozen=True, eq=False)
class Up:
    """r numbers; r more for each of control = "paper" and of steps that are not plain."""

    a: Vector | None
    Pg: Vector | None = None
    z: Vector | None = None
    q: Encoded | None = None  # a_i compressed, instead of a


@register
@dataclass(frozen=True, kw_only=True)
class SSF(InSubspace[ServerState, ClientState, Down, Up], Replayable[ClientState, Down, Up]):
    """Drift correction with r numbers per message."""

    control: Literal["exact", "paper"] = "exact"  # how the server renews c: line 8 or line 8'
    compressor: Compressor | None = None  # C: how the upload is compressed; none: r numbers as they are
    beta: float = 1.0  # β: weight of this round's gradient in what is compressed

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("control", self.control, ("exact", "paper"))
        if self.compressor is not None and (not self.solver.plain or self.control == "paper"):
            raise SpecError("`compressor` needs plain steps; leave out `momentum`, `optimizer` and control = 'paper'")
        positive_share("beta", self.beta)
        if self.beta < 1 and self.compressor is None:
            raise SpecError(f"`beta` {self.beta!r} needs a `compressor`; set one, or leave `beta` at 1")

    @property
    def private(self) -> tuple[str, ...]:
        """Moments, and what a client has not sent yet."""
        return (*super().private, *(("u",) if self.beta < 1 else ()))

    def check(self, layout: Layout) -> None:
        """The compressor must not leave out more of a_i than it sends, or c_i would never catch up."""
        super().check(layout)
        if self.compressor is not None:
            self.needs_contractive(self.compressor, self.projector.size(layout))

    def init_server(self, x0: Vector, layout: Layout) -> ServerState:
        return ServerState(x0, torch.zeros_like(x0), Log())

    def init_client(self, x0: Vector, layout: Layout) -> ClientState:
        unsent = torch.zeros_like(x0 if self.beta < 1 else x0[..., :0])
        return ClientState(torch.zeros_like(x0), unsent, self.no_moments(x0, layout))

    def broadcast(self, server: ServerState, rnd: Round) -> Down:
        P = self.subspace(rnd)  # 1
        return Down(ModelSync(server.x, server.log, rnd.last_round), P @ server.c, P.probe)  # 2

    def client_step(self, client: ClientState, down: Down, f: Objective, rnd: Round) -> tuple[ClientState, Up]:
        P, x, Pc, c_i = self.subspace(rnd), down.sync.model, down.Pc, client.c  # 1
        P.agree(down.probe)
        direction = f.restrict(x, P, plus=Pc - P @ c_i)  # 3
        if not self.solver.plain:
            direction = Averaged(direction)
        z, moments = self.descend_inside(x, P, direction, client.moments, rnd)  # 4
        mean = direction.mean if isinstance(direction, Averaged) else z / (-self.step(P, rnd) * self.local_steps)
        a = mean - Pc  # 5
        Pg = a + P @ c_i if self.control == "paper" else None
        a, u = self._running_mean(client.u, a, P)  # 5'
        up = Up(a, Pg, None if self.solver.plain else z) if self.compressor is None else self._compressed(a, rnd)
        return self.update_client_state(ClientState(c_i, u, moments), down, up, rnd), up

    def state_change(self, up: Up, rnd: Round) -> Vector:
        """a_i as it was sent."""
        if up.a is not None:
            return up.a
        assert self.compressor is not None
        assert up.q is not None
        return self.compressor.decompress(up.q, self.subspace(rnd).rank, self.compressor.keys(rnd), rnd.layout.dtype)

    def replay(self, client: ClientState, change: Vector, rnd: Round) -> ClientState:
        P = self.subspace(rnd)
        u = client.u - P.T @ change if self.beta < 1 else client.u
        return ClientState(P.T.plus(change, client.c, rnd.overwrite), u, client.moments)  # 6

    def server_step(self, server: ServerState, up: Up, rnd: Round) -> ServerState:
        P, x, c = self.subspace(rnd), server.x, server.c
        Pc, mean_a = P @ c, rnd.mean(self.state_change(up, rnd))
        if up.z is None:
            delta = -self.server_lr * self.step(P, rnd) * self.local_steps * (Pc + mean_a)
        else:
            delta = self.server_lr * rnd.mean(up.z)
        x = P.T.plus(delta, x)  # 7
        change = rnd.share * mean_a if up.Pg is None else rnd.mean(up.Pg) - Pc
        return ServerState(x, P.T.plus(change, c, rnd.overwrite), self.push(server.log, delta, rnd))  # 8

    def _running_mean(self, u: Vector, a: Vector, P: LinearMap) -> tuple[Vector, Vector]:
        """Line 5' up to what is sent: P u_i after this round, and u_i with that inside the subspace."""
        if self.beta == 1:
            return a, u
        Pu = P @ u
        mixed = (1 - self.beta) * Pu + self.beta * a
        return mixed, u + P.T @ (mixed - Pu)

    def _compressed(self, a: Vector, rnd: Round) -> Up:
        assert self.compressor is not None
        return Up(None, q=self.compressor.compress(a, self.compressor.keys(rnd)))
