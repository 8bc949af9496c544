"""PowerSGD: low-rank changes by power iteration over rounds and error feedback (Vogels et al. 2019, arXiv:1905.13727).

A matrix block of the model is n × m: out × all the rest, as torch keeps it. P has r orthonormal rows for each block. In
even rounds they act on its rows and z = M Pᵀ is n × r, in odd rounds on its columns and z = Mᵀ Pᵀ is m × r. Other
blocks are sent in full.

     1  send what i lacks of x, and P                        r m numbers per block, or r n
     2  y ← y − η_l g_i(y)                                   K times, from y = x
     3  M_i ← y − x + e_i
     4  z_i ← P M_i;  send z_i                               r n numbers per block, or r m
     5  e_i ← M_i − Pᵀ z_i                                   what was not sent is kept
     6  x ← x + η_g Pᵀ mean_S z_i
     7  P of the other side ← orthonormalized mean_S z_i     for the next round

Two rounds are one power iteration on M. So P turns to where the changes of the model, and the errors kept so far, are
largest; SSF and SubAvg draw theirs at random. The first P is drawn.

Differences from the paper: its step has two exchanges, mean M Q and then mean Mᵀ P̂ with P̂ = orth(mean M Q), and the
second carries the change. A federated round has one exchange. So the two alternate, and each carries the part of the
change that its P sees. P is one round old; at r = 1 the largest stable step is smaller than with the paper's two
exchanges. As there, what is sent is linear in M_i, so only the mean of replies is needed. There e_i is what is left of
the mean of all clients; here it is what is left of the client's own change, which it knows at once. Changes by local
steps replace gradients, the server has no momentum, and QR replaces Gram-Schmidt. A block with r ≥ min(n, m) is sent in
full, because a side then saves nothing.

A change of x is logged and sent as its two factors: min(d, G r (n + m)) numbers for the G rounds that i missed. e_i
follows from the client's own data: no server can keep a copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fedspan import Block, Bundle, Layout, Log, ModelSync, Objective, Round, Vector, register
from fedspan.core import seeds
from fedspan.core.errors import CheckpointError, positive
from fedspan.core.linear_map import LinearMap
from fedspan.core.projector import Rank
from fedspan.methods.base import LocalSteps
from fedspan.projectors._dense import Dense
from fedspan.projectors.gaussian import Gaussian


@dataclass(frozen=True, eq=False)
class Side:
    """The model as matrices of which P acts on one side."""

    layout: Layout  # matrix blocks are n × m, and projected along this side
    ranks: tuple[int | None, ...]  # None for a block that is sent in full

    @property
    def matrices(self) -> list[tuple[int, Block, int]]:
        """(number, block, r) of the blocks that are not sent in full."""
        blocks = enumerate(zip(self.layout.blocks, self.ranks, strict=True))
        return [(number, block, r) for number, (block, r) in blocks if r is not None]

    @property
    def size(self) -> int:
        """Numbers in P."""
        return sum(r * block.inputs for _, block, r in self.matrices)

    def drawn(self, of_runs: tuple[int, ...], side: int) -> Vector:
        """A random P, flat, for the first round of a side."""
        keys, found = (
            seeds.keys(of_runs, "powersgd", side),
            [torch.zeros(len(of_runs), 0, dtype=self.layout.dtype)],
        )
        for number, block, r in self.matrices:
            own = seeds.children(keys, np.full(keys.shape, number))
            found.append(
                Gaussian(rank=r).factor(block.inputs, r, own, self.layout.dtype).p.flatten(1)
            )
        return torch.cat(found, 1).unsqueeze(1)

    def subspace(self, basis: Vector) -> LinearMap:
        """P from its flat numbers."""
        parts = basis.split([r * block.inputs for _, block, r in self.matrices], -1)
        factors: list[Dense | None] = [None] * len(self.ranks)
        for (number, _, r), part in zip(self.matrices, parts, strict=True):
            p = part[:, 0].unflatten(-1, (r, -1))
            factors[number] = Dense(p, p)
        return LinearMap(self.layout, tuple(factors), basis.new_zeros(basis.shape[0], 1, 1))

    def turned(self, z: Vector) -> Vector:
        """P of the other side, flat: the columns of z in each block, orthonormalized."""
        blocks = zip(self.layout.blocks, self.ranks, strict=True)
        parts = z.split([b.size if r is None else r * b.rest for b, r in blocks], -1)
        found = [z[..., :0]]
        for number, _, r in self.matrices:
            q, _ = torch.linalg.qr(parts[number].unflatten(-1, (-1, r)))
            found.append(q.mT.flatten(2))
        return torch.cat(found, -1)


@register
@dataclass(frozen=True, kw_only=True)
class PowerSGD(LocalSteps):
    """A subspace that follows the changes of the model."""

    rank: Rank = 4  # r: a number, a share of min(n, m), or a table of these by name pattern

    server_lr: float = 1.0  # η_g: step size of the server

    private = ("e",)
    later = ("rows", "columns")
    logs_changes = True

    def __post_init__(self) -> None:
        super().__post_init__()
        Gaussian(rank=self.rank)  # checks the rank
        positive("server_lr", self.server_lr)

    def init_server(self, x0: Vector, layout: Layout) -> Bundle:
        return Bundle(x=x0, log=Log())

    def init_client(self, x0: Vector, layout: Layout) -> Bundle:
        return Bundle(e=torch.zeros_like(x0))

    def broadcast(self, server: Bundle, rnd: Round) -> Bundle:
        sync = ModelSync.of(server.x, server.log, rnd)
        return Bundle(sync=sync, basis=self.basis(server, rnd))  # 1

    def client_step(
        self, client: Bundle, down: Bundle, f: Objective, rnd: Round
    ) -> tuple[Bundle, Bundle]:
        P, x = self.side(rnd).subspace(down.basis), down.sync.model
        y = self.descend(x, f.direction(), self.rate(rnd))  # 2
        M = y - x + client.e  # 3
        z = P @ M  # 4
        return Bundle(e=M - P.T @ z), Bundle(z=z)  # 5

    def update_client_state(self, client: Bundle, down: Bundle, up: Bundle, rnd: Round) -> Bundle:
        return client

    def server_step(self, server: Bundle, up: Bundle, rnd: Round) -> Bundle:
        side, basis, mean = self.side(rnd), self.basis(server, rnd), rnd.mean(up.z)
        delta = self.server_lr * mean
        x = server.x + side.subspace(basis).T @ delta  # 6
        turned = {"columns" if rnd.t % 2 == 0 else "rows": side.turned(mean)}  # 7
        return server.replace(x=x, log=self.push(server.log, delta, basis, rnd), **turned)

    def empty_round(self, server: Bundle, rnd: Round) -> Bundle:
        basis = self.basis(server, rnd)
        rank = self.side(rnd).subspace(basis).rank
        nothing = basis.new_zeros(*basis.shape[:-1], rank)
        return server.replace(log=self.push(server.log, nothing, basis, rnd))

    def push(self, log: Log, delta: Vector, basis: Vector, rnd: Round) -> Log:
        """Add this round's change, and keep as many before it as are cheaper than x."""
        entry = torch.cat([delta, basis], -1)
        return log.push(entry, max(1, rnd.layout.size // entry.shape[-1]))

    def apply_entry(self, copy: Vector, entry: Vector, rnd: Round) -> Vector:
        """x + Pᵀ δ; an entry holds δ, then P."""
        side = self.side(rnd)
        own = entry.shape[-1] - side.size
        return copy + side.subspace(entry[..., own:]).T @ entry[..., :own]

    def basis(self, server: Bundle, rnd: Round) -> Vector:
        """P of this round, flat: from the replies of the round before, or drawn if there are none."""
        held, side = server.get("columns" if rnd.t % 2 else "rows"), self.side(rnd)
        if held is not None and (held.shape, held.dtype) != (
            (len(rnd.seeds), 1, side.size),
            rnd.layout.dtype,
        ):
            raise CheckpointError(
                "the checkpoint is damaged: its P is of another shape or type; start the run again"
            )
        return side.drawn(rnd.seeds, rnd.t % 2) if held is None else held

    def side(self, rnd: Round) -> Side:
        """Rows in even rounds, columns in odd ones."""
        ranks = tuple(self.rank_of(block) for block in rnd.layout.blocks)
        blocks = zip(rnd.layout.blocks, ranks, strict=True)
        axis = 0 if rnd.t % 2 else 1
        shaped = (
            b if r is None else Block(b.name, (b.shape[0], b.size // b.shape[0]), axis)
            for b, r in blocks
        )
        return Side(Layout(tuple(shaped), rnd.layout.dtype), ranks)

    def rank_of(self, block: Block) -> int | None:
        """r of a block; None if it is sent in full."""
        if block.axis is None:
            return None
        asked, full = (
            Gaussian(rank=self.rank).asked(block),
            min(block.shape[0], block.size // block.shape[0]),
        )
        r = asked if isinstance(asked, int) else max(1, round(asked * full))
        return r if r < full else None
