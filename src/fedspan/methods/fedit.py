"""FedIT: LoRA adapters trained at the clients and averaged factor by factor (Zhang et al. 2023, arXiv:2305.05644).

     1  A, B ← orthonormal rows by the common seed, 0               before round 0
     2  send the base weights W to who is new, and A, B
     3  G ← ∇f_i(W + s B A; ξ),  s = α/r
        B ← B − η_l s G Aᵀ,  A ← A − η_l s Bᵀ G                     K times, both from the old values
     4  A ← A + η_g mean_S (A_i − A),  B ← B + η_g mean_S (B_i − B)

mean A_i times mean B_i is not the mean of B_i A_i: the model that the server makes is one that no average of the
clients' models is. `ffalora` is the answer to that.

Differences from the paper: plain local steps unless an `optimizer` is given (there Adam), and a server step η_g, which
is 1 there. The full gradient G is formed and multiplied down, so a local step costs what one of full training costs:
this file is about what travels. Weight decay, where the objective has one, is that of the merged weights; an
optimizer's own is that of A and B. See `_lora` for the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fedspan.core.layout import Block, Vector
from fedspan.core.method import Round
from fedspan.core.objective import Objective
from fedspan.core.projector import Factor
from fedspan.core.registry import register
from fedspan.methods._lora import Adapted, Down, Up, of_cohort
from fedspan.methods.base import NoState

Part = tuple[Block, Vector, Vector, Factor | None]


@register
@dataclass(frozen=True, kw_only=True)
class FedIT(Adapted):
    """r (out + in) numbers a block on the wire."""

    def adapter(self, block: Block) -> int:
        return self.rank_of(block) * (block.size // block.inputs + block.inputs)

    def client_step(self, client: NoState, down: Down, f: Objective, rnd: Round) -> tuple[NoState, Up]:
        base, u = down.sync.model, of_cohort(down.u, rnd)
        self.start(rnd).agree(down.probe)

        def direction(u: Vector) -> Vector:
            return self.chained(f.grad(self.merged(base, u, rnd)), u, rnd)  # 3

        return client, Up(self.descend(u, direction, self.rate(rnd.t), self.origin(base, rnd)) - u)

    def merged(self, base: Vector, u: Vector, rnd: Round) -> Vector:
        """W + s B A, and the other blocks with their change."""
        out = []
        for block, w, part, start in self.parts(base.expand(*u.shape[:2], -1), u, rnd):
            if start is None:
                out.append(w + part if part.shape[-1] else w)
            else:
                b, a = factors(block, part, start)
                out.append(block.vector(block.matrix(w) + self.scale(block) * (b @ a)))
        return torch.cat(out, -1)

    def chained(self, gradient: Vector, u: Vector, rnd: Round) -> Vector:
        """The gradient of what is trained, s G Aᵀ and s Bᵀ G, from that of the merged weights."""
        out = []
        for block, g, part, start in self.parts(gradient, u, rnd):
            if start is None:
                out.append(g[..., : part.shape[-1]])
            else:
                (b, a), g = factors(block, part, start), self.scale(block) * block.matrix(g)
                out += [(g @ a.mT).flatten(2), (b.mT @ g).flatten(2)]
        return torch.cat(out, -1)

    def parts(self, v: Vector, u: Vector, rnd: Round) -> Iterator[Part]:
        """(block, its part of v, its part of u, the start of its A) for every block; no start where it has no A."""
        blocks = rnd.layout.blocks
        pieces = v.split([block.size for block in blocks], -1), u.split(self.sizes(rnd.layout), -1)
        return zip(blocks, *pieces, self.start(rnd).factors, strict=True)


def factors(block: Block, part: Vector, start: Factor) -> tuple[torch.Tensor, torch.Tensor]:
    """B (rest × r) and A (r × in) of an adapted block; u holds B, then the change of A."""
    inner = start.rank * block.inputs
    b, change = part.split([part.shape[-1] - inner, inner], -1)
    return b.unflatten(-1, (-1, start.rank)), start.columns().mT.unsqueeze(1) + change.unflatten(-1, (start.rank, -1))
