"""AUROC: the probability that a random positive example is scored above a random negative one; a tie counts half."""

from __future__ import annotations

import torch

from fedspan.core.registry import register
from fedspan.metrics._collected import Ranks


@register
class AUROC(Ranks):
    """Of one score, or the mean over classes, each against the others."""

    @staticmethod
    def of(positives: torch.Tensor, negatives: torch.Tensor) -> torch.Tensor:
        below = negatives.cumsum(0) - negatives / 2
        return (positives * below).sum() / (positives.sum() * negatives.sum())
