"""AUROC: the probability that a random positive example is scored above a random negative one; a tie counts half."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedspan.core.registry import register
from fedspan.metrics._collected import Ranking


@register
@dataclass(eq=False)
class AUROC(Ranking):
    """Of one score, or the mean over classes, each against the others."""

    def of_ranks(self, positives: torch.Tensor, negatives: torch.Tensor) -> float:
        below = negatives.cumsum(0) - negatives / 2
        return float((positives * below).sum() / (positives.sum() * negatives.sum()))
