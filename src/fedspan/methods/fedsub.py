"""FedSub: local steps and dual variables that both live in the subspace (arXiv:2509.05213).

     1  P ← projector(seed, t), drawn every `refresh` rounds      server and clients
     2  send what i lacks of x: the b̄ of the rounds it missed
     3  b ← b − η_l P g_i(x + Pᵀb) − Λ_i/K                              K times, from b = 0;  send b_i
     4  x ← x + η_g Pᵀ b̄,   b̄ = mean_S b_i
     5  Λ_i ← Λ_i + b_i − b̄                                             for i in S
    5'  Λ_i ← Λ_i + E_i − b̄,   E_i the last b_i                         for ALL i:  variant = "stale"
     6  when P is refreshed:  Λ_i ← (P_new P_oldᵀ) Λ_i   (and E_i)

Differences from the paper: it defines no client sampling. Line 5 for the sampled clients keeps Σ Λ_i = 0 (the default,
`variant = "zero_sum"`). Line 5' is the only reading we found that diverges at r = 50, as the SSF paper reports. A
server step size η_g is added, which is 1 there. With momentum v ← β v + P g_i takes the place of P g_i in line 3; the
dual stays outside of v, as in the authors' code. Inside, it would count Σ_k Σ_{j≤k} β^j / K times and Λ_i would grow.
Line 5' updates nothing in a round without replies: there is no b̄.

A client receives b̄ of a round only when it takes part again. It then does lines 5 and 6 for all rounds since; the
result is the same. If it is sent x in full, the b̄ that line 5 needs is sent too (one vector; for 5' all of them).
Where the server moves x by something else than η_g b̄ (`_server_side`), that is sent beside b̄: 2r numbers per round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from fedspan import (
    Layout,
    Log,
    ModelSync,
    Objective,
    Restorable,
    Round,
    SpecError,
    Vector,
    register,
)
from fedspan.core.errors import one_of
from fedspan.core.projector import draw
from fedspan.core.sync import Entry, worth_sending
from fedspan.methods._server_side import ServerMomentum
from fedspan.methods.base import InSubspace, LoggedModel, ProbedDown


@dataclass(frozen=True, eq=False)
class ClientState:
    """Λ_i + b_i of its last round, in the basis of that round; the stale variant keeps them separate."""

    dual: Vector  # Λ_i + b_i; stale: Λ_i
    end: Vector  # empty; stale: E_i


@dataclass(frozen=True, eq=False)
class Up:
    """r numbers."""

    b: Vector


@register
@dataclass(frozen=True, kw_only=True)
class FedSub(
    ServerMomentum,
    InSubspace[LoggedModel, ClientState, ProbedDown, Up],
    Restorable[ClientState, ProbedDown, Up],
):
    """Drift correction by dual variables that are rotated from subspace to subspace."""

    uses_mean_only = True
    refresh: int = 5  # rounds after which a new P is drawn
    variant: Literal["zero_sum", "stale"] = (
        "zero_sum"  # line 5, for the clients that took part, or 5', for all
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("variant", self.variant, ("zero_sum", "stale"))
        if self.optimizer is not None:
            self.only_plain("its duals are end points, which must be η_l K times a mean gradient")
        if self.keeps_moments:
            raise SpecError(
                f"`moments` {self.moments!r} is not for fedsub, which keeps duals; leave it out"
            )

    @property
    def follows_states(self) -> bool:
        """The duals of all clients sum to zero."""
        return True

    def init_server(self, x0: Vector, layout: Layout) -> LoggedModel:
        return LoggedModel(x0, Log(), self.no_velocity(x0))

    def init_client(self, x0: Vector, layout: Layout) -> ClientState:
        r = self.projector.size(layout)
        ends = r if self.variant == "stale" else 0
        return ClientState(x0.new_zeros(*x0.shape[:-1], r), x0.new_zeros(*x0.shape[:-1], ends))

    def broadcast(self, server: LoggedModel, rnd: Round) -> ProbedDown:
        keep: Literal["all", "first"] = "all" if self.variant == "stale" else "first"
        return ProbedDown(
            ModelSync.of(server.x, server.log, rnd, keep), self.subspace(rnd).probe
        )  # 2

    def client_step(
        self, client: ClientState, down: ProbedDown, f: Objective, rnd: Round
    ) -> tuple[ClientState, Up]:
        P, x = self.subspace(rnd), down.sync.model  # 1
        P.agree(down.probe)
        dual = self._dual_now(client, down.sync, rnd)  # 5, 6 of the rounds since
        start, shift = torch.zeros_like(dual), -dual / self.local_steps
        b, _ = self.solver.descend(
            start, f.restrict(x, P), self.step(P, rnd), self.local_steps, shift=shift
        )  # 3
        return self._after(client, dual, b), Up(b)

    def update_client_state(
        self, client: ClientState, down: ProbedDown, up: Up, rnd: Round
    ) -> ClientState:
        return self._after(client, self._dual_now(client, down.sync, rnd), up.b)

    def _after(self, client: ClientState, dual: Vector, b: Vector) -> ClientState:
        return (
            ClientState(dual, b) if self.variant == "stale" else ClientState(dual + b, client.end)
        )

    def server_step(self, server: LoggedModel, up: Up, rnd: Round) -> LoggedModel:
        P, mean_b = self.subspace(rnd), rnd.mean(up.b)
        if not self.own_move:
            x = server.x + self.server_lr * (P.T @ mean_b)  # 4
            return LoggedModel(x, self.push(server.log, mean_b, rnd), server.m)
        delta = self.server_lr * mean_b * (self.stretch(up.b, rnd) if self.extrapolate else 1.0)
        move, m = self.moved_on(server.m, delta, P)
        entry = torch.cat([mean_b, move], -1)
        return LoggedModel(server.x + P.T @ move, self.push(server.log, entry, rnd), m)

    @property
    def own_move(self) -> bool:
        """Whether x moves by something else than η_g b̄."""
        return self.extrapolate or self.server_momentum > 0

    def push(self, log: Log, entry: Entry, rnd: Round) -> Log:
        """The changes that are worth sending; before them line 5 needs the b̄ of each client's last round, 5' all."""
        if self.variant == "stale":
            return log.push(entry, rnd.t + 1 - rnd.oldest)
        missed, worth = (
            rnd.missed_by_any,
            worth_sending(entry, rnd.layout.size * rnd.layout.dtype.itemsize, "first"),
        )
        return log.push(entry, min(missed, worth), rnd.still_last if missed > worth else None)

    def expand_entry(self, entry: Vector, rnd: Round) -> Vector:
        """η_g Pᵀ b̄, or the move that is sent beside b̄."""
        if self.own_move:
            return super().expand_entry(entry.chunk(2, -1)[1], rnd)
        return self.server_lr * super().expand_entry(entry, rnd)

    def no_move(self, x: Vector, rnd: Round) -> Vector:
        return x.new_zeros(*x.shape[:-1], self.subspace(rnd).rank * (2 if self.own_move else 1))

    def _dual_now(self, client: ClientState, sync: ModelSync, rnd: Round) -> Vector:
        """Λ_i at the start of round t, for a cohort that last took part in rounds `rnd.last_round`."""
        dual, end = client.dual, client.end
        stale = self.variant == "stale"
        last_round = (
            np.maximum(rnd.last_round, 0)
            if stale
            else np.where(rnd.last_round < 0, rnd.t, rnd.last_round)
        )
        for j in range(int(last_round.min()), rnd.t):
            here = torch.from_numpy(last_round <= j if stale else last_round == j).unsqueeze(-1)
            if here.any():
                mean_b = sync.log.at(j)[..., : dual.shape[-1]]
                if stale:
                    here = here & mean_b.any(-1, keepdim=True)  # `empty_round` logs zeros
                dual = torch.where(here, (dual + end if stale else dual) - mean_b, dual)  # 5
            if (j + 1) % self.refresh == 0:
                old = draw(self.projector, rnd.layout, rnd.seeds, j // self.refresh)
                new = draw(self.projector, rnd.layout, rnd.seeds, (j + 1) // self.refresh)
                touched = torch.from_numpy(last_round <= j).unsqueeze(-1)
                dual = torch.where(touched, new @ (old.T @ dual), dual)  # 6
                end = torch.where(touched, new @ (old.T @ end), end) if stale else end
        return dual
