"""FFA-LoRA: LoRA adapters whose A is frozen, so that averaging is exact (Sun et al. 2024, arXiv:2403.12313).

The box is that of `_lora`, with u = B. Line 3 is

        B ← B − η_l ∇f_i(W + B A; ξ) Aᵀ

A is the same everywhere, so mean (B_i A) = (mean B_i) A: unlike in FedIT, the server's model is the mean of the
clients' models. This is training inside one subspace that never changes: SubAvg with a single P, and FedAvg at full
rank. A local step asks the objective for P ∇f(x + Pᵀz), which networks compute without a full gradient.

Differences from the paper: plain local steps without the noise of differential privacy, and a server step size η_g,
which is 1 there.
"""

from dataclasses import dataclass

from fedspan import Objective, Round, Vector, register
from fedspan.core.objective import Direction
from fedspan.methods._lora import Adapted


@register
@dataclass(frozen=True, kw_only=True)
class FFALoRA(Adapted):
    """r out numbers per block and message."""

    trains_a = False

    def direction(self, f: Objective, base: Vector, rnd: Round) -> Direction:
        return f.restrict(base, self.start(rnd))

    def merged(self, base: Vector, u: Vector, rnd: Round) -> Vector:
        return base + self.start(rnd).T @ u
