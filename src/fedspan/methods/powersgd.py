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

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedspan import (
    Block,
    Bundle,
    Layout,
    Log,
    ModelSync,
    Objective,
    Round,
    Vector,
    register,
)
from fedspan.core import seeds
from fedspan.core.errors import CheckpointError, positive
from fedspan.core.projector import Factor, LinearMap, Rank
from fedspan.methods.base import LocalSteps
from fedspan.projectors._dense import Dense
from fedspan.projectors.gaussian import Gaussian


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
        P, x = self.subspace(down.basis, rnd), down.sync.model
        y = self.descend(x, f.direction(), self.rate(rnd))  # 2
        M = y - x + client.e  # 3
        z = P @ M  # 4
        return Bundle(e=M - P.T @ z), Bundle(z=z)  # 5

    def update_client_state(self, client: Bundle, down: Bundle, up: Bundle, rnd: Round) -> Bundle:
        return client

    def server_step(self, server: Bundle, up: Bundle, rnd: Round) -> Bundle:
        basis, mean = self.basis(server, rnd), rnd.mean(up.z)
        P, delta = self.subspace(basis, rnd), self.server_lr * mean
        x = server.x + P.T @ delta  # 6
        turned = {"rows" if rnd.t % 2 else "columns": self.turned(P, mean)}  # 7
        return server.replace(x=x, log=self.push(server.log, delta, basis, rnd), **turned)

    def empty_round(self, server: Bundle, rnd: Round) -> Bundle:
        basis = self.basis(server, rnd)
        nothing = basis.new_zeros(*basis.shape[:-1], self.subspace(basis, rnd).rank)
        return server.replace(log=self.push(server.log, nothing, basis, rnd))

    def push(self, log: Log, delta: Vector, basis: Vector, rnd: Round) -> Log:
        """Return the log with this round's change, and as many before it as are cheaper than x."""
        entry = torch.cat([delta, basis], -1)  # of one length in even and odd rounds
        return log.push(entry, max(1, rnd.layout.size // entry.shape[-1]))

    def apply_entry(self, copy: Vector, entry: Vector, rnd: Round) -> Vector:
        """Return x + Pᵀ δ; an entry holds δ, then P."""
        own = entry.shape[-1] - sum(self.sizes(rnd))
        moved: Vector = self.subspace(entry[..., own:], rnd).T @ entry[..., :own]
        return copy + moved

    # P: rows of the matrices in even rounds, columns in odd ones; flat, one matrix after the other

    def rank_of(self, block: Block) -> int:
        """Return r of a block that P may act on; min(n, m) if that is no more."""
        asked, full = Gaussian(rank=self.rank).asked(block), min(_matrix(block))
        return min(full, asked if isinstance(asked, int) else max(1, round(asked * full)))

    def side(self, rnd: Round) -> Layout:
        """Return the model as matrices, and the side on which P acts; blocks without one are sent in full."""
        axis = 1 - rnd.t % 2
        blocks = [
            Block(b.name, _matrix(b), axis)
            if b.axis is not None and self.rank_of(b) < min(_matrix(b))
            else Block(b.name, b.shape)
            for b in rnd.layout.blocks
        ]
        return Layout(tuple(blocks), rnd.layout.dtype)

    def sizes(self, rnd: Round) -> list[int]:
        """Return the number of values of P in each block; 0 where it is sent in full."""
        return [0 if b.axis is None else self.rank_of(b) * b.inputs for b in self.side(rnd).blocks]

    def basis(self, server: Bundle, rnd: Round) -> Any:
        """Return P of this round: from the replies of the round before, or drawn if there are none."""
        held, dtype = server.get("columns" if rnd.t % 2 else "rows"), rnd.layout.dtype
        if held is None:
            keys = seeds.keys(rnd.seeds, "powersgd", rnd.t % 2)
            drawn = [torch.zeros(len(rnd.seeds), 0, dtype=dtype)]
            for number, b in enumerate(self.side(rnd).blocks):
                if b.axis is not None:
                    own = seeds.children(keys, np.full(keys.shape, number))
                    p = Gaussian().factor(b.inputs, self.rank_of(b), own, dtype).p
                    drawn.append(p.flatten(1))
            return torch.cat(drawn, 1).unsqueeze(1)
        if (held.shape, held.dtype) != ((len(rnd.seeds), 1, sum(self.sizes(rnd))), dtype):
            raise CheckpointError(
                "the checkpoint is damaged: its P is of another shape or type; start the run again"
            )
        return held

    def subspace(self, basis: Vector, rnd: Round) -> LinearMap:
        """Return P as a map."""
        side, factors = self.side(rnd), list[Factor | None]()
        for block, part in zip(side.blocks, basis[:, 0].split(self.sizes(rnd), -1), strict=True):
            p = None if block.axis is None else part.unflatten(-1, (-1, block.inputs))
            factors.append(None if p is None else Dense(p, p))
        return LinearMap(side, tuple(factors), basis.new_zeros(len(basis), 1, 1))

    def turned(self, P: LinearMap, z: Vector) -> Vector:
        """Return P of the other side: the columns of z in each matrix, orthonormalized."""
        found = [z[..., :0]]
        for factor, _, part in P.by_block(z.split(P.sizes, -1)):
            if factor is not None:
                q: Vector = torch.linalg.qr(part.unflatten(-1, (-1, factor.rank)))[0]
                found.append(q.mT.flatten(2))
        return torch.cat(found, -1)


def _matrix(block: Block) -> tuple[int, int]:
    """Return (n, m)."""
    return block.shape[0], block.size // block.shape[0]
