"""FedIT: LoRA adapters trained at the clients and averaged factor by factor (Zhang et al. 2023, arXiv:2305.05644).

The box is that of `_lora`, with u = (B, A). Line 3 is

        G ← ∇f_i(W + B A; ξ)
        B ← B − η_l G Aᵀ,  A ← A − η_l Bᵀ G                         both from the old values

mean B_i times mean A_i is not the mean of B_i A_i: the server's model is not the mean of the clients' models. `ffalora`
avoids this.

Differences from the paper: plain local steps by default (there Adam), and a server step size η_g, which is 1 there. The
full gradient G is formed and multiplied, so a local step costs as much as in full training: this file is about what is
sent. Weight decay of the objective applies to the merged weights, that of an optimizer to A and B.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fedspan import Block, Objective, Round, Vector, register
from fedspan.core.objective import Direction
from fedspan.methods._lora import Adapted


@register
@dataclass(frozen=True, kw_only=True)
class FedIT(Adapted):
    """r (out + in) numbers per block and message."""

    def direction(self, f: Objective, base: Vector, rnd: Round) -> Direction:
        return lambda u: self.chained(f.grad(self.merged(base, u, rnd)), u, rnd)

    def merged(self, base: Vector, u: Vector, rnd: Round) -> Vector:
        """Return W + B A, and the other blocks plus their change."""
        out = []
        for w, (block, b, a) in zip(
            base.split(rnd.layout.sizes, -1), self.factors(u, rnd), strict=True
        ):
            if a is not None:
                b = block.vector(b @ a, u.shape[1])
            out.append(w + b)
        return torch.cat(out, -1)

    def chained(self, gradient: Vector, u: Vector, rnd: Round) -> Vector:
        """Return the gradient for B and A, G Aᵀ and Bᵀ G, from that for the merged weights."""
        out = []
        for g, (block, b, a) in zip(
            gradient.split(rnd.layout.sizes, -1), self.factors(u, rnd), strict=True
        ):
            if a is None:
                out.append(g)
            else:
                g = block.rows(g).unflatten(1, (u.shape[1], -1))
                out += [(g @ a.mT).flatten(2), (b.mT @ g).flatten(2)]
        return torch.cat(out, -1)

    def factors(
        self, u: Vector, rnd: Round
    ) -> Iterator[tuple[Block, torch.Tensor, torch.Tensor | None]]:
        """Return (block, B (rest × r), A (r × in)) of every block; (block, its change, None) without an adapter."""
        for first, block, part in self.start(rnd).by_block(u.split(self.sizes(rnd.layout), -1)):
            if first is None:
                yield block, part, None
            else:
                r = first.rank
                b, change = part.split([r * block.rest, r * block.inputs], -1)
                a = first.columns().mT.unsqueeze(1) + change.unflatten(-1, (r, -1))
                yield block, b.unflatten(-1, (-1, r)), a
