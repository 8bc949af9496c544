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
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from fedspan import (
    Bundle,
    Layout,
    Log,
    ModelSync,
    Objective,
    Projector,
    Round,
    SpecError,
    Vector,
    register,
)
from fedspan.core.errors import positive
from fedspan.core.projector import LinearMap, Rank, draw
from fedspan.core.registry import name_of
from fedspan.methods.base import LocalSteps
from fedspan.optimizers.sgd import SGD
from fedspan.projectors.coordinate import Coordinate


@register
@dataclass(frozen=True, kw_only=True)
class FedSub(LocalSteps):
    """Drift correction by dual variables that are rotated from subspace to subspace."""

    space: Projector = Coordinate(rank=0.1, refresh=5)  # where x moves in a round
    rank: Rank | None = None  # replaces the rank of `space`
    variant: Literal["zero_sum", "stale"] = "zero_sum"  # line 5, or 5', for all clients
    server_lr: float = 1.0  # η_g: step size of the server

    plain_sum = logs_changes = True
    follows_states = True  # the duals of all clients sum to zero

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("server_lr", self.server_lr)
        if not isinstance(self.local, SGD):
            raise SpecError(
                f"`local` {name_of(self.local)!r} is not for fedsub: its duals are end points, which must be η_l K "
                "times a mean gradient; use sgd"
            )
        if self.rank is not None:
            object.__setattr__(self, "space", replace(self.space, rank=self.rank))
            object.__setattr__(self, "rank", None)

    def check(self, layout: Layout) -> None:
        """Raise SpecError if the rank does not fit every block."""
        self.space.size(layout)

    def subspace(self, rnd: Round, t: int | None = None) -> LinearMap:
        """P_t, of this round by default."""
        epoch = (rnd.t if t is None else t) // self.space.refresh
        return draw(self.space, rnd.layout, rnd.seeds, epoch)

    def init_server(self, x0: Vector, layout: Layout) -> Bundle:
        return Bundle(x=x0, log=Log())

    def init_client(self, x0: Vector, layout: Layout) -> Bundle:
        """`dual` is Λ_i + b_i of the client's last round, in the basis of that round; stale: Λ_i, and `end` E_i."""
        zeros = x0.new_zeros(*x0.shape[:-1], self.space.size(layout))
        return Bundle(dual=zeros, end=zeros if self.variant == "stale" else None)

    def broadcast(self, server: Bundle, rnd: Round) -> Bundle:
        keep: Literal["all", "first"] = "all" if self.variant == "stale" else "first"
        sync = ModelSync.of(server.x, server.log, rnd, keep)
        return Bundle(sync=sync, probe=self.subspace(rnd).probe)  # 2

    def client_step(
        self, client: Bundle, down: Bundle, f: Objective, rnd: Round
    ) -> tuple[Bundle, Bundle]:
        P, x = self.subspace(rnd), down.sync.model  # 1
        P.agree(down.get("probe"))
        dual = self._dual_now(client, down.sync, rnd)  # 5, 6 of the rounds since
        start, shift = torch.zeros_like(dual), -dual / self.local_steps
        steps = f.restrict(x, P), self.rate(rnd), self.local_steps
        b = self.local.descend(start, *steps, shift=shift)[0]  # 3
        return self._after(dual, b), Bundle(b=b)

    def update_client_state(self, client: Bundle, down: Bundle, up: Bundle, rnd: Round) -> Bundle:
        return self._after(self._dual_now(client, down.sync, rnd), up.b)

    def _after(self, dual: Vector, b: Vector) -> Bundle:
        return Bundle(dual=dual, end=b) if self.variant == "stale" else Bundle(dual=dual + b)

    def server_step(self, server: Bundle, up: Bundle, rnd: Round) -> Bundle:
        mean_b = rnd.mean(up.b)
        x = self.apply_entry(server.x, mean_b, rnd)  # 4
        return server.replace(x=x, log=self._push(server.log, mean_b, rnd))

    def empty_round(self, server: Bundle, rnd: Round) -> Bundle:
        nothing = server.x.new_zeros(*server.x.shape[:-1], self.subspace(rnd).rank)
        return server.replace(log=self._push(server.log, nothing, rnd))

    def apply_entry(self, copy: Vector, entry: Any, rnd: Round) -> Vector:
        """x + η_g Pᵀ b̄."""
        moved: Vector = self.subspace(rnd).T @ entry
        return copy + self.server_lr * moved

    def _push(self, log: Log, entry: Vector, rnd: Round) -> Log:
        """Add b̄; keep those worth sending, and before them line 5 needs that of each client's last round, 5' all."""
        if self.variant == "stale":
            return log.push(entry, rnd.t + 1 - rnd.oldest)
        missed, worth = rnd.missed_by_any, rnd.layout.size // entry.shape[-1] + 1
        return log.push(entry, min(missed, worth), rnd.still_last if missed > worth else None)

    def _dual_now(self, client: Bundle, sync: ModelSync, rnd: Round) -> Any:
        """Return Λ_i at the start of round t, for a cohort that last took part in rounds `rnd.last_round`."""
        stale, dual = self.variant == "stale", client.dual
        end: Any = client.get("end")
        new = 0 if stale else rnd.t  # from which round on a client without one counts
        last_round = np.where(rnd.last_round < 0, new, rnd.last_round)
        for j in range(int(last_round.min()), rnd.t):
            began = torch.from_numpy(last_round <= j).unsqueeze(-1)
            here = began if stale else torch.from_numpy(last_round == j).unsqueeze(-1)
            if here.any():
                mean_b = sync.log.at(j)
                if stale:
                    here = here & mean_b.any(-1, keepdim=True)  # `empty_round` logs zeros
                dual = torch.where(here, (dual + end if stale else dual) - mean_b, dual)  # 5
            if (j + 1) % self.space.refresh == 0:
                old, P = self.subspace(rnd, j), self.subspace(rnd, j + 1)
                dual = torch.where(began, P @ (old.T @ dual), dual)  # 6
                end = torch.where(began, P @ (old.T @ end), end) if stale else end
        return dual
