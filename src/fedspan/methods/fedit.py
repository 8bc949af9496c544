"""FedIT: LoRA adapters trained at the clients and averaged factor by factor (Zhang et al. 2023, arXiv:2305.05644).

     1  A, B ← orthonormal rows by the shared seed, 0               before round 0
     2  send the base weights W to new clients, and A, B
     3  G ← ∇f_i(W + s B A; ξ),  s = α/r
        B ← B − η_l s G Aᵀ,  A ← A − η_l s Bᵀ G                     K times, both from the old values
     4  A ← A + η_g mean_S (A_i − A),  B ← B + η_g mean_S (B_i − B)

mean B_i times mean A_i is not the mean of B_i A_i: the server's model is not the mean of the clients' models. `ffalora`
avoids this.

Differences from the paper: plain local steps by default (there Adam), and a server step size η_g, which is 1 there. The
full gradient G is formed and multiplied, so a local step costs as much as in full training: this file is about what is
sent. Weight decay of the objective applies to the merged weights, that of an optimizer to A and B. See `_lora` for the
rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fedspan import Block, Bundle, Objective, Round, Vector, register
from fedspan.core.linear_map import Factor
from fedspan.methods._lora import Adapted, of_cohort

Part = tuple[Block, Vector, Vector, Factor | None]


@register
@dataclass(frozen=True, kw_only=True)
class FedIT(Adapted):
    """r (out + in) numbers per block and message."""

    def adapter(self, block: Block) -> int:
        return self.rank_of(block) * (block.rest + block.inputs)

    def client_step(
        self, client: Bundle, down: Bundle, f: Objective, rnd: Round
    ) -> tuple[Bundle, Bundle]:
        base, u = down.sync.model, of_cohort(down.u, rnd)
        self.start(rnd).agree(down.probe)

        def direction(u: Vector) -> Vector:
            return self.chained(f.grad(self.merged(base, u, rnd)), u, rnd)  # 3

        return client, Bundle(
            du=self.descend(u, direction, self.rate(rnd), self.origin(base, rnd)) - u
        )

    def merged(self, base: Vector, u: Vector, rnd: Round) -> Vector:
        """W + s B A, and the other blocks plus their change."""
        out = []
        for block, w, part, start in self.parts(base.expand(*u.shape[:2], -1), u, rnd):
            if start is None:
                out.append(w + part if part.shape[-1] else w)
            else:
                b, a = factors(block, part, start)
                merged = matrices(block, w) + self.scale(block) * (b @ a)
                out.append(block.vector(merged.flatten(1, 2), w.shape[1]))
        return torch.cat(out, -1)

    def chained(self, gradient: Vector, u: Vector, rnd: Round) -> Vector:
        """The gradient for B and A, s G Aᵀ and s Bᵀ G, from that for the merged weights."""
        out = []
        for block, g, part, start in self.parts(gradient, u, rnd):
            if start is None:
                out.append(g[..., : part.shape[-1]])
            else:
                (b, a), g = factors(block, part, start), self.scale(block) * matrices(block, g)
                out += [(g @ a.mT).flatten(2), (b.mT @ g).flatten(2)]
        return torch.cat(out, -1)

    def parts(self, v: Vector, u: Vector, rnd: Round) -> Iterator[Part]:
        """(block, its part of v, its part of u, the start of its A or None) for every block."""
        blocks = rnd.layout.blocks
        pieces = v.split([block.size for block in blocks], -1), u.split(self.sizes(rnd.layout), -1)
        return zip(blocks, *pieces, self.start(rnd).factors, strict=True)


def matrices(block: Block, v: Vector) -> torch.Tensor:
    """A block's part of a vector as one matrix per client, (runs, clients, rest, in)."""
    matrix: torch.Tensor = block.rows(v).unflatten(1, (v.shape[1], -1))
    return matrix


def factors(block: Block, part: Vector, start: Factor) -> tuple[torch.Tensor, torch.Tensor]:
    """B (rest × r) and A (r × in) of a block with an adapter; u holds B, then the change of A."""
    inner = start.rank * block.inputs
    b, change = part.split([part.shape[-1] - inner, inner], -1)
    return b.unflatten(-1, (-1, start.rank)), start.columns().mT.unsqueeze(1) + change.unflatten(
        -1, (start.rank, -1)
    )
