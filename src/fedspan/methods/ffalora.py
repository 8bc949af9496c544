"""FFA-LoRA: LoRA adapters whose A is frozen, so that averaging is exact (Sun et al. 2024, arXiv:2403.12313).

The box is that of `_lora`, with u = B. Line 3 is

        B ← B − η_l s ∇f_i(W + s B A; ξ) Aᵀ,  s = α/r

A is the same everywhere, so mean (B_i A) = (mean B_i) A: unlike in FedIT, the server's model is the mean of the
clients' models. This is training inside one subspace that never changes: SubAvg with a single P, and FedAvg at full
rank. A local step asks the objective for P ∇f(x + Pᵀz), which networks compute without a full gradient. Plain steps
move s B by −η_l s² ∇f Aᵀ, so s has the same effect as the step size.

Differences from the paper: plain local steps without the noise of differential privacy, and a server step size η_g,
which is 1 there.
"""

from dataclasses import dataclass

import torch

from fedspan import Layout, Objective, Round, Vector, register
from fedspan.core.objective import Direction
from fedspan.methods._lora import Adapted


@register
@dataclass(frozen=True, kw_only=True)
class FFALoRA(Adapted):
    """r out numbers per block and message."""

    trains_a = False

    def direction(self, f: Objective, base: Vector, rnd: Round) -> Direction:
        gradient, s = f.restrict(base, self.start(rnd)), self.scales(base, rnd.layout)
        return gradient if s is None else lambda u: s * gradient(s * u)

    def merged(self, base: Vector, u: Vector, rnd: Round) -> Vector:
        s = self.scales(base, rnd.layout)
        return base + self.start(rnd).T @ (u if s is None else s * u)

    def scales(self, like: Vector, layout: Layout) -> Vector | None:
        """Return s of every trained value; None if all are 1."""
        if self.alpha is None:
            return None
        pairs = zip(layout.blocks, self.sizes(layout), strict=True)
        return torch.cat(
            [like.new_full((n,), 1.0 if b.axis is None else self.scale(b)) for b, n in pairs]
        )
