"""Average precision: the area under the precision-recall curve, for classes with few positive examples."""

from __future__ import annotations

import torch

from fedspan.core.registry import register
from fedspan.metrics._collected import Ranks


@register
class AveragePrecision(Ranks):
    """Of one score, or the mean over classes, each against the others."""

    @staticmethod
    def of(positives: torch.Tensor, negatives: torch.Tensor) -> torch.Tensor:
        """Return the mean precision of the positive examples."""
        right, wrong = positives.flip(0), negatives.flip(0)
        return (right * right.cumsum(0) / (right + wrong).cumsum(0)).sum() / right.sum()
