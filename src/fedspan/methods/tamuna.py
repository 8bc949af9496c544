"""TAMUNA: local steps, partial participation and masks that cover each other (Condat et al. 2023, arXiv:2302.09832).

     1  L ← Geometric(p), p = 1/K                        server and clients, from the shared seed; E L = K
     2  send x to the clients in S
     3  y ← y − η_l (g_i(y) − h_i)                       L times, from y = x
     4  send y_j where q_ij = 1                          about s d/|S| values
     5  x_j ← mean of y_ij over the s clients with q_ij = 1
     6  h_i ← h_i + (η/η_l) q_i ∘ (x − y_i)              x of line 5;  Σ_i h_i = 0
        η = p |S|(s − 1)/(s(|S| − 1))

q_i is the client's column of a template: row j has ones in the columns s j, …, s j + s − 1, modulo |S|. Columns are
dealt to the clients anew in each round. All y_i agree in the end and h_i = ∇f_i(x) at the optimum, with any s ≥ 2.

Differences from the paper: a client is sent the x of line 5 when it next takes part, together with the one of that
round: d values if it took part in the round before, 2d otherwise (there it is sent x where q_i = 1 at the end of its
own round). Line 6 is with the x of its own round in any case; with a later one Σ h_i ≠ 0 and x would end elsewhere. The
server keeps one x for each round in which some client last took part. A reply that is lost leaves its values out of
line 5, and its client's h_i as it was. Clients may have weights; then means are weighted and Σ w_i h_i = 0.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fedspan import Bundle, Layout, Log, ModelSync, Objective, Round, Vector, register
from fedspan.core import seeds
from fedspan.core.errors import at_least
from fedspan.methods.base import LocalSteps


@register
@dataclass(frozen=True, kw_only=True)
class Tamuna(LocalSteps):
    """Corrected local steps of which each client sends a part, and each value comes from some clients."""

    owners: int | None = 2  # s: clients of a round that send each value; None: all of them

    logs_changes = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.owners is not None:
            at_least("owners", self.owners, 2)
        self.needs_plain_steps("corrections are end points of plain steps")

    def init_server(self, x0: Vector, layout: Layout) -> Bundle:
        return Bundle(x=x0, log=Log())

    def init_client(self, x0: Vector, layout: Layout) -> Bundle:
        """`h` lacks the x of line 6, for the column and the cohort in `part`, until the client is sent it."""
        part = x0.new_zeros(*x0.shape[:-1], 2, dtype=torch.int32)
        return Bundle(h=x0.new_zeros(x0.shape), part=part)

    def broadcast(self, server: Bundle, rnd: Round) -> Bundle:
        cohort = rnd.ids.shape[1]
        columns = torch.from_numpy(seeds.permute(seeds.keys(rnd.seeds, "template", rnd.t), cohort))
        part = torch.stack([columns, torch.full_like(columns, cohort)], -1).int()
        return Bundle(sync=ModelSync.of(server.x, server.log, rnd, "first"), part=part)  # 2

    def client_step(
        self, client: Bundle, down: Bundle, f: Objective, rnd: Round
    ) -> tuple[Bundle, Bundle]:
        h, lr = self._correction(client, down.sync, rnd), self.rate(rnd)
        y, taken, direction = down.sync.model, 0, f.direction(-h)
        lengths = self._lengths(rnd)
        for length in sorted(set(lengths)):  # runs stop at their own L
            end = self.local.descend(y, direction, lr, length - taken)[0]
            going = torch.tensor([own >= length for own in lengths]).view(-1, 1, 1)
            y, taken = torch.where(going, end, y), length  # 3
        places, there = self._places(down.part, y.shape[-1], rnd)
        v = torch.where(there, y.expand(*rnd.ids.shape, -1).gather(-1, places), 0.0)  # 4
        return self._sent(h, v, down.part, rnd), Bundle(v=v, part=down.part.expand(*v.shape[:2], 2))

    def update_client_state(self, client: Bundle, down: Bundle, up: Bundle, rnd: Round) -> Bundle:
        return self._sent(self._correction(client, down.sync, rnd), up.v, up.part, rnd)

    def server_step(self, server: Bundle, up: Bundle, rnd: Round) -> Bundle:
        places, there = self._places(up.part, rnd.layout.size, rnd)
        w: Any = 1.0 if rnd.weights is None else rnd.weights
        own, places = w * there.to(up.v.dtype), places.flatten(1)
        total, share = (
            torch.zeros_like(server.x).squeeze(1).scatter_add_(-1, places, part.flatten(1))
            for part in (own * up.v, own)
        )
        mean = (total / share).unsqueeze(1)
        return self._pushed(server, torch.where((share > 0).unsqueeze(1), mean, server.x), rnd)  # 5

    def empty_round(self, server: Bundle, rnd: Round) -> Bundle:
        return self._pushed(server, server.x, rnd)

    def apply_entry(self, copy: Vector, entry: Vector, rnd: Round) -> Vector:
        """Return x after the round, which is the entry itself."""
        return entry

    def _pushed(self, server: Bundle, x: Vector, rnd: Round) -> Bundle:
        """Log x, and keep those of the clients' last rounds."""
        missed = rnd.missed_by_any
        log = server.log.push(x, min(missed, 2), rnd.still_last if missed > 2 else None)
        return server.replace(x=x, log=log)

    def _lengths(self, rnd: Round) -> list[int]:
        """Return L of each run."""
        if self.local_steps == 1:
            return [self.local_steps] * len(rnd.seeds)
        u = seeds.uniform(seeds.keys(rnd.seeds, "length", rnd.t), 1)[:, 0]
        return [1 + int(math.log(one) / math.log1p(-1 / self.local_steps)) for one in u.tolist()]

    def _places(self, part: torch.Tensor, d: int, rnd: Round) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the numbers of the values that each client sends, (runs, clients, n), and which of them exist."""
        column, cohort = part.long().split(1, -1)
        s = cohort.clamp(1, self.owners)
        if part.is_meta:  # no values: as many as clients of this round send
            most = rnd.ids.shape[1]
            n = -(-min(self.owners or most, most) * d // most)
        else:
            n = int(-(-s * d // cohort.clamp(min=1)).max())
        places = (column + cohort * torch.arange(n)) // s
        return places.clamp(max=d - 1), (places < d) & (cohort > 0)

    def _spread(self, v: Vector, part: torch.Tensor, like: Vector, rnd: Round) -> Vector:
        """Return (η/η_l) q_i ∘ v_i as d values, from those that are sent."""
        places, there = self._places(part, like.shape[-1], rnd)
        cohort = part[..., 1:].to(v.dtype)
        s = cohort.clamp(1, self.owners)
        share = torch.where(cohort > s, cohort * (s - 1) / (s * (cohort - 1)), 1.0)
        scaled = share / (self.local_steps * self.rate(rnd)) * torch.where(there, v, 0.0)
        return torch.zeros_like(like).scatter_add_(-1, places, scaled)

    def _sent(self, h: Vector, v: Vector, part: torch.Tensor, rnd: Round) -> Bundle:
        """Return the state after a reply: line 6 without x."""
        part = part.expand(*v.shape[:2], 2)
        return Bundle(h=h - self._spread(v, part, h, rnd), part=part.contiguous())

    def _correction(self, client: Bundle, sync: ModelSync, rnd: Round) -> Any:
        """Return h_i: line 6 of the round in which each client last took part, with the x of that round."""
        h, part = client.h, client.part
        for t in np.unique(rnd.last_round[rnd.last_round >= 0]).tolist():
            places, _ = self._places(part, h.shape[-1], rnd)
            x = sync.log.at(t).expand_as(h).gather(-1, places)
            then = torch.from_numpy(rnd.last_round == t).unsqueeze(-1)
            h = torch.where(then, h + self._spread(x, part, h, replace(rnd, t=t)), h)  # 6
        return h
