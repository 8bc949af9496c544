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

Near the optimum a_i is mostly the noise of this round's mini-batches. With `beta` below 1 line 5 sends β a_i, so that
c_i, c and, with plain steps, the direction of line 7 are running means of gradients. With P = I it is SCALLION without
a compressor. With a compressor, what C leaves out of a_i is mostly noise too. The client keeps the running mean v_i of
its gradients, as u_i = v_i − c_i, and compresses u_i:

    5'  P u_i ← (1 − β) P u_i + β (−z/(η_l K) − P c);  a_i ← C(P u_i), sent;  u_i ← u_i − Pᵀ a_i

Outside the subspace u_i stays, as c_i does. This is momentum for error feedback with noisy gradients (Fatkhullin et
al. 2023, arXiv:2305.15155), and with P = I it is SCAFCOM. It costs the client d more numbers of its own memory. Without
a compressor u_i is always 0, and nothing is kept.

The paper always corrects; that is correction = "always". By default, "tested", the server decides by a test whether
line 4 uses u (`_correction`), and with "never" line 4 leaves out u. Lines 5 to 8 stay the same: where u was left out,
a_i ← −z/(η_l K) − u − P c.

`_server_side` describes momentum, extrapolation and compression at the server. With a `down_compressor` P c is
compressed too. Clients cancel its error: a_i = P ḡ_i − P c_i for whatever P c they were sent, and at the optimum c = 0.
With `keep_control` P c is not sent at all, and clients keep a copy of c (`_kept_control`).

`_preconditioner` describes the scale D of local steps that all clients share. Lines 4, 5 and 7 then use D.

Momentum or another optimizer works on the corrected gradient of line 4. a_i stays P ḡ_i − P c_i, from the mean of the
gradients themselves, so that c = mean c_i still holds. z no longer follows from a_i and is sent too, and line 7 becomes
x ← x + η_g Pᵀ mean_S z. `moments` says what becomes of the optimizer's memory between two rounds of a client.

Differences from the paper: its box has no client sampling. Read literally under sampling it is line 8', which breaks
c = mean c_i and needs P ḡ_i on the uplink as well (2r numbers); it is offered because the paper's tables were made
with it, and because a robust aggregator needs it: whatever the aggregator leaves out of a round, line 8' forgets and
line 8 keeps. With full participation and the mean, 8 and 8' are the same. Clients may have weights w_i; then
c = Σ w_i c_i.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from fedspan import (
    Compressor,
    Encoded,
    Layout,
    Objective,
    Restorable,
    Round,
    SpecError,
    Vector,
    register,
)
from fedspan.core.errors import ProtocolError, one_of, positive_share
from fedspan.core.linear_map import LinearMap
from fedspan.core.method import Measures
from fedspan.core.seeds import Keys
from fedspan.core.sync import Log, ModelSync, SyncedDown
from fedspan.methods._correction import TEST, Correction, completed, corrected
from fedspan.methods._kept_control import KeptControl, with_factors
from fedspan.methods._preconditioner import Scaled
from fedspan.methods.base import Averaged


@dataclass(frozen=True, eq=False)
class ServerState:
    """The model, the mean of all controls, and the last changes of the model; the other fields are empty by default."""

    x: Vector
    c: Vector
    log: Log
    m: Vector  # the server's momentum
    e: Vector  # what a compressed download has left out so far
    copied: Vector  # ĉ, the copy of c that clients keep
    test: Vector  # what the tests of the correction have told
    v: Vector  # mean squares of the rows of mean gradients, for the preconditioner


@dataclass(frozen=True, eq=False)
class ClientState:
    """The client's control, d numbers in its own memory, never sent; the other fields are empty by default."""

    c: Vector
    u: Vector  # v_i − c_i; empty if β = 1 or without a compressor
    moments: Vector  # of the optimizer; empty if they are reset


@dataclass(frozen=True, eq=False)
class Down(SyncedDown):
    """What the client lacks of x, r numbers of control, and one number to check P."""

    Pc: Vector | None  # none if it is compressed, or if clients keep a copy of c
    probe: torch.Tensor
    switch: torch.Tensor | None = None  # one byte: whether to correct
    qc: Encoded | None = None  # P c compressed
    v: Vector | None = None  # the server's, for the preconditioner


@dataclass(frozen=True, eq=False)
class Up:
    """r numbers; r more for each of control = "paper" and of steps that are not plain."""

    a: Vector | None
    Pg: Vector | None = None
    z: Vector | None = None
    q: Encoded | None = None  # a_i compressed, instead of a
    test: Vector | None = field(
        default=None, metadata=TEST
    )  # n_i and d_i, by which the correction is tested


@register
@dataclass(frozen=True, kw_only=True)
class SSF(
    Correction, KeptControl[ServerState, ClientState, Down, Up], Restorable[ClientState, Down, Up]
):
    """Drift correction with r numbers per message."""

    controls = ("c",)
    uses_mean_only = True
    correction: Literal["always", "tested", "never"] = (
        "tested"  # whether clients correct local steps; paper: "always"
    )
    control: Literal["exact", "paper"] = "exact"  # how the server renews c: line 8 or line 8'
    compressor: Compressor | None = (
        None  # C: how the upload is compressed; none: r numbers as they are
    )
    beta: float = (
        1.0  # β: weight of this round's gradient in the controls; below 1 they are running means
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("control", self.control, ("exact", "paper"))
        if self.compressor is not None and (not self.solver.plain or self.control == "paper"):
            raise SpecError(
                "`compressor` needs plain steps; leave out `momentum`, `optimizer` and control = 'paper'"
            )
        if self.keep_control and self.control == "paper":
            raise SpecError(
                "`keep_control` needs control = 'exact', after which c follows from the changes of x"
            )
        positive_share("beta", self.beta)
        if self.beta < 1 and self.control == "paper":
            raise SpecError(
                f"`beta` {self.beta!r} needs control = 'exact'; with 'paper' leave `beta` at 1"
            )

    @property
    def needs_each_reply(self) -> bool:
        """Compressed replies are decoded one by one, each with its own key."""
        return self.extrapolate or self.compressor is not None

    @property
    def follows_states(self) -> bool:
        """Line 8 does. Line 8' does not: it puts the mean gradient of the round in the place of P c."""
        return self.control == "exact"

    @property
    def private(self) -> tuple[str, ...]:
        """Moments, and what a client has not sent yet."""
        return (*super().private, *(("u",) if self.keeps_unsent else ()))

    @property
    def keeps_unsent(self) -> bool:
        """Whether clients keep u_i."""
        return self.beta < 1 and self.compressor is not None

    def check(self, layout: Layout) -> None:
        """The compressor must not leave out more of a_i than it sends, or c_i would never catch up."""
        super().check(layout)
        if self.compressor is not None:
            self.needs_contractive(self.compressor, self.projector.size(layout))

    def init_server(self, x0: Vector, layout: Layout) -> ServerState:
        zeros, m, e = torch.zeros_like(x0), self.no_velocity(x0), self.nothing_unsent(x0)
        copied, v = zeros if self.keep_control else zeros[..., :0], self.no_squares(x0, layout)
        return ServerState(x0, zeros, Log(), m, e, copied, self.no_tests(x0), v)

    def init_client(self, x0: Vector, layout: Layout) -> ClientState:
        unsent = torch.zeros_like(x0 if self.keeps_unsent else x0[..., :0])
        return ClientState(torch.zeros_like(x0), unsent, self.no_moments(x0, layout))

    def broadcast(self, server: ServerState, rnd: Round) -> Down:
        P = self.subspace(rnd)  # 1
        sync = ModelSync.of(_joined(server) if self.keep_control else server.x, server.log, rnd)
        switch, Pc = (
            self.switch(server.test) if self.tests else None,
            None if self.keep_control else P @ server.c,
        )
        v = server.v if self.scaled and not self.keep_control else None
        if Pc is None or self.down_compressor is None:
            return Down(sync, Pc, P.probe, switch, None, v)  # 2
        return Down(
            sync,
            None,
            P.probe,
            switch,
            self.down_compressor.compress(Pc, self._control_keys(rnd)),
            v,
        )

    def received(
        self, down: Down, P: LinearMap, rnd: Round
    ) -> tuple[Vector, Vector, Vector | None]:
        """x, P c and v as a client has them."""
        if self.keep_control:
            x, c, _, v = self.apart(down.sync.model, rnd.layout)
            return x, P @ c, v
        if down.Pc is not None:
            return down.sync.model, down.Pc, down.v
        if self.down_compressor is None or down.qc is None:
            raise ProtocolError(
                "the download holds no control; both ends must use the same settings"
            )
        Pc = self.down_compressor.decompress(
            down.qc, P.rank, self._control_keys(rnd), rnd.layout.dtype
        )
        return down.sync.model, Pc, down.v

    def _control_keys(self, rnd: Round) -> Keys:
        assert self.down_compressor is not None
        return self.down_compressor.server_keys(rnd, "control")

    def client_step(
        self, client: ClientState, down: Down, f: Objective, rnd: Round
    ) -> tuple[ClientState, Up]:
        P = self.subspace(rnd)  # 1
        P.agree(down.probe)
        up, unsent, moments = self._steps(
            client, down, f, P, rnd
        )  # its other vectors are gone before line 6
        return self.update_client_state(ClientState(client.c, unsent, moments), down, up, rnd), up

    def _steps(
        self, client: ClientState, down: Down, f: Objective, P: LinearMap, rnd: Round
    ) -> tuple[Up, Vector, Vector]:
        """Lines 3 to 5': the reply, u_i and the moments."""
        x, Pc, v = self.received(down, P, rnd)
        u, b = Pc - P @ client.c, self.corrects(down.switch, rnd)  # 3
        direction = watched = self.watched(f.restrict(x, P, plus=corrected(b, u)), u, b)
        if not self.solver.plain:
            direction = Averaged(direction)
        D = self.scales(v, P) if self.scaled else None
        steps = direction if D is None else Scaled(direction, D)
        z, moments = self.descend_inside(x, P, steps, client.moments, rnd)  # 4
        mean = (
            direction.mean
            if isinstance(direction, Averaged)
            else z.div_(-self.step(P, rnd) * self.local_steps)
        )
        mean = mean if D is None else mean / D
        a = completed(mean - Pc, b, u)  # 5
        test = self.measured(u, Pc, b, a, watched, self.local_steps)
        Pg = a + P @ client.c if self.control == "paper" else None
        a, unsent = self._running_mean(client.u, a, P)  # 5'
        up = Up(a, Pg, None if self.solver.plain else z, None, test)
        if self.compressor is not None:
            up = replace(up, a=None, q=self.compressor.compress(a, self.compressor.keys(rnd)))
        return up, unsent, moments

    def state_change(self, up: Up, rnd: Round) -> Vector:
        """a_i as it was sent."""
        if up.a is not None:
            return up.a
        assert self.compressor is not None
        assert up.q is not None
        return self.compressor.decompress(
            up.q, self.subspace(rnd).rank, self.compressor.keys(rnd), rnd.layout.dtype
        )

    def update_client_state(
        self, client: ClientState, down: Down, up: Up, rnd: Round
    ) -> ClientState:
        P, change = self.subspace(rnd), self.state_change(up, rnd)
        u = client.u - P.T @ change if self.keeps_unsent else client.u
        return ClientState(P.T.plus(change, client.c, rnd.overwrite), u, client.moments)  # 6

    def server_step(self, server: ServerState, up: Up, rnd: Round) -> ServerState:
        P, x, c = self.subspace(rnd), server.x, server.c
        a = self.state_change(up, rnd)
        Pc, mean_a, D = P @ c, rnd.mean(a), self.scales(server.v, P) if self.scaled else None
        mean_g, v = Pc + mean_a, server.v
        if up.z is None:
            delta = (
                -self.server_lr
                * self.step(P, rnd)
                * self.local_steps
                * (mean_g if D is None else D * mean_g)
            )
        else:
            delta = self.server_lr * rnd.mean(up.z)
        factor: torch.Tensor | float = 1.0
        if self.extrapolate:
            factor = self.stretch((1 if D is None else D) * (Pc + a) if up.z is None else up.z, rnd)
            delta = delta * factor
        entry, move, m, e = self.move(server.m, server.e, delta, P, rnd)
        change = rnd.share * mean_a if up.Pg is None else rnd.mean(up.Pg) - Pc
        c = P.T.plus(change, c, rnd.overwrite and not self.keep_control)  # 8
        copied, test = server.copied, server.test
        if self.keep_control:
            entry = with_factors(entry, x, rnd.share, factor)
            x, copied, m, v = self.apart(self.apply_entry(_joined(server), entry, rnd), rnd.layout)
        else:
            x, v = P.T.plus(move, x), self.squares(v, mean_g, P) if self.scaled else v  # 7
        if up.test is not None:
            test = self.judged(test, self.told(test, up.test, rnd), P.rank / rnd.layout.size, rnd)
        return ServerState(x, c, self.push(server.log, entry, rnd), m, e, copied, test, v)

    def measures(self, server: ServerState) -> Measures:
        return self.test_values(server.test)

    def _running_mean(self, u: Vector, a: Vector, P: LinearMap) -> tuple[Vector, Vector]:
        """Line 5' up to what is sent: P u_i after this round, and u_i with that inside the subspace."""
        if not self.keeps_unsent:
            return a if self.beta == 1 else self.beta * a, u
        Pu = P @ u
        mixed = (1 - self.beta) * Pu + self.beta * a
        return mixed, u + P.T @ (mixed - Pu)


def _joined(server: ServerState) -> Vector:
    """All that a client copies: x, ĉ, m and v."""
    return torch.cat([server.x, server.copied, server.m, server.v], -1)
