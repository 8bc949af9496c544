"""AdamW: each coordinate of a step is divided by the size of its past gradients (Loshchilov and Hutter 2019).

     1  y ← y − η λ (origin + y)                     weight decay, apart from the gradient
     2  m ← β_1 m + (1 − β_1) g;   v ← β_2 v + (1 − β_2) g²
     3  y ← y − η m̂ / (√v̂ + ε),   m̂ = m/(1 − β_1^t),  v̂ = v/(1 − β_2^t)

g is the direction of the method: in `ssf` the corrected gradient P∇f_i + P c − P c_i. Inside a subspace y is the
displacement z and origin is P x, so that line 1 is the part of the decay of x + Pᵀz that lies in the subspace. Without
an origin this is torch.optim.AdamW, step for step. The paper is arXiv:1711.05101.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from fedspan import LinearMap, Optimizer, Vector, register
from fedspan.core.errors import below_one, not_negative, positive


@register
@dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """AdamW; its memory is m, v and t: 2n + 1 numbers."""

    beta1: float = 0.9  # β_1: decay of the mean of gradients
    beta2: float = 0.999  # β_2: decay of the mean of squared gradients
    eps: float = 1e-8  # ε: gradients much smaller than this are not enlarged
    decay: float = 0.0  # λ: weight decay, apart from the gradient
    moments: Literal["reset", "project"] = "reset"  # memory between a client's rounds

    def __post_init__(self) -> None:
        below_one("beta1", self.beta1)
        below_one("beta2", self.beta2)
        positive("eps", self.eps)
        not_negative("decay", self.decay)

    def step(self, y: Vector, g: Vector, memory: Vector, lr: float, origin: Vector | None) -> None:
        m, v, t = memory.split([g.shape[-1], g.shape[-1], 1], -1)
        if self.decay:
            y.sub_(y if origin is None else origin + y, alpha=lr * self.decay)  # 1
        m.lerp_(g, 1 - self.beta1)  # 2
        v.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)
        t.add_(1)
        left1, left2 = (  # 1 − β^t needs the digits
            (1 - beta ** t.double()).to(y.dtype) for beta in (self.beta1, self.beta2)
        )
        scale = v.sqrt().div_(left2.sqrt()).add_(self.eps).mul_(left1)
        y.addcdiv_(m, scale, value=-lr)  # 3

    def size(self, n: int) -> int:
        return 2 * n + 1

    def carry(self, held: Vector, old: LinearMap, new: LinearMap) -> Vector:
        """Return m as far as the new subspace sees it, v by the overlap of the two; t goes on."""
        m, v, t = held.split([old.rank, old.rank, 1], -1)
        return torch.cat([super().carry(m, old, new), carried_squares(v, old, new), t], -1)


def carried_squares(v: Vector, old: LinearMap, new: LinearMap) -> Vector:
    """Return means of squared gradients through P as means through P', block by block; full blocks keep theirs.

    Assume that the coordinates of g are uncorrelated. Then E (P'g)² is the elementwise square of P'Pᵀ times E (Pg)²,
    plus what P' sees outside of P. Only the share of the latter is known, so its size is taken to be the mean of its
    row of the weight. For coordinates: those that are still there keep their number, the others get the mean.
    """
    found = []
    for part, f, g in zip(v.split(old.sizes, -1), old.factors, new.factors, strict=True):
        if f is not None and g is not None:
            rows = part.reshape(len(part), -1, f.rank)  # out × r, for every client
            ones = torch.ones_like(rows[:, :1])
            if f.index is not None:  # P'Pᵀ is of zeros and ones, which are their own squares
                seen, share = g.down(f.up(rows)), g.down(f.up(ones))
            else:
                squares = g.down(f.columns().mT).square()
                seen, share = rows @ squares, ones @ squares
            rows = seen + (1 - share).clamp_min(0) * rows.mean(-1, keepdim=True)
            part = rows.reshape(part.shape)
        found.append(part)
    return torch.cat(found, -1)
