"""A shared preconditioner: every row of a weight has its own step size, the same at all clients of a round.

AdamW keeps moments at each client, and its steps send twice the numbers, because the mean gradient does not follow from
the end point. Here the scale is the server's, fixed within a round and known to both ends
(P = I where a block is sent in full):

     1  z ← z − η_l D (P g_i + u)                       K times
     2  P ḡ_i + u = −D⁻¹ z/(η_l K)                      r numbers tell the mean gradient, and compressors work
     3  x ← x − η_g η_l K Pᵀ D w                        w: the mean gradient as the server knows it
     4  v ← β₂ v + (1 − β₂) mean over each row of w²    a number per row
     5  D ← κ / (√v + ε σ),  σ² = mean of v             κ: so that ‖D √v‖ = ‖√v‖

Line 5 leaves the length of a step along w as it is without D, so a learning rate keeps its meaning. It is invariant to
the scale of the loss and to the missing rounds of a running mean at the start. D = 1 before the first round has told v.
D ≤ κ/(ε σ) bounds the steps of rows whose gradients vanish.

All clients use the same D, so corrections still cancel in the mean, c = mean c_i holds, and at the optimum the
corrected gradients are zero before they are scaled. Rows, not single numbers: each row is seen in every round through
any P, and its mean square is that of many numbers. A row is an output of a weight matrix or a token of an embedding; a
block of one axis, such as a bias, is one row. v is sent with the download, a number per row.
"""

from dataclasses import dataclass

import torch

from fedspan import Block, Bundle, Layout, Optimizer, Parts, Vector, register
from fedspan.core.errors import below_one, positive
from fedspan.core.projector import Factor, LinearMap


@register
@dataclass(frozen=True, kw_only=True)
class Preconditioned(Optimizer):
    """Plain steps with a scale per row of a weight that all clients share."""

    beta2: float = 0.9  # β₂: weight of the past rounds
    eps: float = 0.1  # ε: rows with gradients below this share of the mean are not enlarged further
    plain = scaled = True

    def __post_init__(self) -> None:
        below_one("beta2", self.beta2)
        positive("eps", self.eps)

    def step(self, y: Vector, g: Vector, memory: Vector, lr: float, origin: Vector | None) -> None:
        y.add_(g, alpha=-lr)

    def init_server(self, x0: Vector, layout: Layout) -> Parts:
        return {"squares": x0.new_zeros(*x0.shape[:-1], sum(map(_groups, layout.blocks)))}

    def down(self, server: Bundle) -> Parts:
        return {"squares": server.squares}

    def server(self, server: Bundle, w: Vector, P: LinearMap) -> Parts:
        rows = [_rows(*one).square().mean(-1) for one in P.by_block(w.split(P.sizes, -1))]
        now = torch.cat(rows, -1).unsqueeze(1)
        return {"squares": self.beta2 * server.squares + (1 - self.beta2) * now}  # 4

    def scales(self, source: Bundle, P: LinearMap) -> Vector:
        v, groups = source.squares, [_groups(block) for block in P.layout.blocks]
        counts = zip(groups, P.sizes, strict=True)
        share = torch.cat([v.new_full((g,), n / g / P.rank) for g, n in counts])
        mean = (share * v).sum(-1, keepdim=True)
        D = 1 / (v.sqrt() + self.eps * mean.sqrt())
        D = D * (mean / (share * D * D * v).sum(-1, keepdim=True)).sqrt()
        D = torch.where(mean > 0, D, torch.ones_like(D))  # 5
        found = []
        for (factor, block, part), n in zip(P.by_block(D.split(groups, -1)), P.sizes, strict=True):
            rows = part.squeeze(1).unsqueeze(-1).expand(-1, -1, n // part.shape[-1])
            whole = factor is None and block.axis is not None
            found.append(block.vector(rows, 1) if whole else rows.flatten(1).unsqueeze(1))
        return torch.cat(found, -1)


def _groups(block: Block) -> int:
    """Return how many rows a block has."""
    if block.axis is not None:
        return block.rest
    return block.shape[0] if len(block.shape) > 1 else 1


def _rows(factor: Factor | None, block: Block, part: Vector) -> torch.Tensor:
    """Return a block's part of one vector inside the subspace as rows, (runs, rows, n)."""
    if factor is None and block.axis is not None:
        return block.rows(part)
    return part.reshape(len(part), _groups(block), -1)
