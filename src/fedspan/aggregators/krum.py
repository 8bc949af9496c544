"""Krum: the reply that is closest to its nearest neighbors (Blanchard et al. 2017).

The score of a reply is the sum of its squared distances to its S − f − 2 nearest others, f = `hostile` · S rounded up.
Krum takes the reply with the lowest score; multi-Krum the mean of the `keep` lowest. With one reply kept, a round
learns from one client only. Every client counts once, whatever its weight.
"""

import math
from dataclasses import dataclass

import torch

from fedspan import Aggregator, Round, Vector, register
from fedspan.core.errors import below_one, count_or_ratio


@register
@dataclass(frozen=True, kw_only=True)
class Krum(Aggregator):
    """The mean of the replies that others resemble."""

    hostile: float = 0.2  # share of the replies that may be hostile
    keep: int | float = 1  # replies to average, a number or share; above 1 multi-Krum

    def __post_init__(self) -> None:
        below_one("hostile", self.hostile)
        count_or_ratio("keep", self.keep)

    def combine(self, v: Vector, rnd: Round) -> Vector:
        count = v.shape[1]
        neighbors = min(max(1, count - math.ceil(self.hostile * count) - 2), count - 1)
        wide = v.double()
        apart = torch.cdist(wide, wide, compute_mode="donot_use_mm_for_euclid_dist").square()
        scores = (
            apart.sort(-1).values[..., 1 : neighbors + 1].sum(-1)
        )  # the nearest of all is the reply itself
        kept = self.keep if isinstance(self.keep, int) else math.ceil(self.keep * count)
        best = scores.argsort(dim=1, stable=True)[:, : min(kept, count), None]
        return v.gather(1, best.expand(-1, -1, v.shape[-1])).mean(1, keepdim=True)
