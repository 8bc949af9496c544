"""FFA-LoRA: LoRA adapters whose A is frozen, so that averaging is exact (Sun et al. 2024, arXiv:2403.12313).

     1  A ← orthonormal rows by the shared seed, once               server and clients
     2  send the base weights W to new clients, and B
     3  B ← B − η_l s ∇f_i(W + s B A; ξ) Aᵀ,  s = α/r               K times
     4  B ← B + η_g mean_S (B_i − B)

A is the same everywhere, so mean (B_i A) = (mean B_i) A: unlike in FedIT, the server's model is the mean of the
clients' models. This is training inside one subspace that never changes: SubAvg with a single P, and FedAvg at full
rank. A local step asks the objective for P ∇f(x + Pᵀz), which networks compute without a full gradient. u = s B is
sent. Plain steps move it by −η_l s² ∇f Aᵀ, so s has the same effect as the step size.

Differences from the paper: plain local steps without the noise of differential privacy, and a server step size η_g,
which is 1 there. See `_lora` for the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedspan import Block, Bundle, Layout, Objective, Round, Vector, register
from fedspan.core.objective import Direction
from fedspan.methods._lora import Adapted, of_cohort


@register
@dataclass(frozen=True, kw_only=True)
class FFALoRA(Adapted):
    """r out numbers per block and message."""

    trains_a = False

    def adapter(self, block: Block) -> int:
        return self.rank_of(block) * block.rest

    def client_step(
        self, client: Bundle, down: Bundle, f: Objective, rnd: Round
    ) -> tuple[Bundle, Bundle]:
        A, base, u = self.start(rnd), down.sync.model, of_cohort(down.u, rnd)  # 1
        A.agree(down.probe)
        s, gradient = self.scales(u, rnd.layout), f.restrict(base, A)
        direction = gradient if s is None else self.scaled(gradient, s, rnd.layout)
        B = self.descend(
            u if s is None else u / s, direction, self.rate(rnd), self.origin(base, rnd)
        )  # 3
        return client, Bundle(du=(B if s is None else s * B) - u)

    def scales(self, u: Vector, layout: Layout) -> Vector | None:
        """s of every trained number; None if all are 1 and nothing is frozen, so that u is B itself."""
        if self.alpha is None and self.others == "trained":
            return None
        pairs = zip(layout.blocks, self.sizes(layout), strict=True)
        return torch.cat(
            [u.new_full((n,), 1.0 if b.axis is None else self.scale(b)) for b, n in pairs]
        )

    def scaled(self, gradient: Direction, s: Vector, layout: Layout) -> Direction:
        """B ↦ s ∇f Aᵀ at W + s B A, without the frozen blocks."""
        return lambda B: s * self.trained(gradient(self.filled(s * B, layout)), layout)

    def merged(self, base: Vector, u: Vector, rnd: Round) -> Vector:
        """W + s B A, and the other blocks plus their change."""
        return base + self.start(rnd).T @ self.filled(u, rnd.layout)

    def filled(self, u: Vector, layout: Layout) -> Vector:
        """u with zeros for the frozen blocks."""
        if self.others == "trained":
            return u
        pairs = zip(layout.blocks, u.split(self.sizes(layout), -1), strict=True)
        return torch.cat(
            [p if b.axis is not None else p.new_zeros(*p.shape[:-1], b.size) for b, p in pairs], -1
        )

    def trained(self, z: Vector, layout: Layout) -> Vector:
        """z without the frozen blocks."""
        if self.others == "trained":
            return z
        sizes = [
            b.size if b.axis is None else n
            for b, n in zip(layout.blocks, self.sizes(layout), strict=True)
        ]
        pairs = zip(layout.blocks, z.split(sizes, -1), strict=True)
        return torch.cat([p for b, p in pairs if b.axis is not None], -1)
