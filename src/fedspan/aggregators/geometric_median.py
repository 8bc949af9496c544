"""Geometric median: the point of least total distance to the replies (Pillutla et al. 2022, arXiv:1912.13445).

     1  m ← median of each coordinate
     2  β_i ← w_i / max(‖v_i − m‖, ν);  m ← Σ β_i v_i / Σ β_i          until ‖Σ β_i (v_i − m)‖ ≤ 1e-8 (Weiszfeld)

Line 2 ends where the pulls of the replies, of length w_i each with Σ w_i = 1, cancel up to 1e-8. Σ w_i ‖v_i − m‖ is
convex, so it is then at most 2e-8 above its minimum, relative to itself. ν, which keeps β_i finite, is a millionth
of the median distance of line 1 by weight, and adds at most ν/2. Most rounds take 10 to 30 steps. Where one of the
replies is the geometric median, or nearly so, they can be many, and 1000 bound them. The result holds as long as
less than half of the weight is hostile.

m is a mean of the replies, so all distances follow from the products of the replies with each other: a step costs S²
operations and not S d.

Differences from the paper: line 1, where the paper starts from the mean, which one huge reply moves far away; and the
tolerance, where the paper takes three steps.
"""

from dataclasses import dataclass

import torch

from fedspan import Aggregator, Round, Vector, register
from fedspan.core.aggregator import middle

TOLERANCE = 1e-8  # what is left of the pulls of all replies
MOST_STEPS = 1000
SMOOTHING = 1e-6  # smallest distance, as a multiple of the median one
PIECE = 1 << 16  # numbers of a reply whose products are taken at once


@register
@dataclass(frozen=True, kw_only=True)
class GeometricMedian(Aggregator):
    """Weiszfeld's smoothed iteration."""

    def combine(self, v: Vector, rnd: Round) -> Vector:
        start = middle(v)  # 1
        # ⟨v_i − start, v_j − start⟩, (runs, clients, clients)
        products = v.new_zeros(v.shape[0], v.shape[1], v.shape[1], dtype=torch.float64)
        for part, own in zip(v.split(PIECE, -1), start.split(PIECE, -1), strict=True):
            apart = part.double() - own.double()
            products += apart @ apart.mT
        w = torch.ones_like(products[..., :1]) if rnd.weights is None else rnd.weights.double()
        w = w / w.sum(1, keepdim=True)
        share = torch.zeros_like(w)  # of each reply in m − start
        ordered = _distances(products, share).sort(1)
        below = (w.gather(1, ordered.indices).cumsum(1) < 0.5).sum(1, keepdim=True)
        median = ordered.values.gather(1, below.clamp(max=v.shape[1] - 1))  # by weight
        least = (SMOOTHING * median).clamp(min=1e-300)
        moving = torch.ones_like(least, dtype=torch.bool)  # (runs, 1, 1)
        for _ in range(MOST_STEPS):
            near = w / _distances(products, share).clamp(min=least)
            total = near.sum(1, keepdim=True)
            change = near / total - share
            share = torch.where(moving, near / total, share)  # 2
            pull = total * (change.mT @ products @ change).clamp(min=0).sqrt()
            moving = moving & (pull > TOLERANCE)
            if not moving.any():
                break
        return (share.to(v.dtype) * v).sum(1, keepdim=True)


def _distances(products: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """‖v_i − m‖ for m = start + Σ share_j (v_j − start), (runs, clients, 1)."""
    along = products @ share
    squares = products.diagonal(dim1=1, dim2=2).unsqueeze(-1) - 2 * along + share.mT @ along
    return squares.clamp(min=0).sqrt()
