"""Average precision: the area under the precision-recall curve, for classes with few positive examples."""

from __future__ import annotations

import torch

from fedspan.core.registry import register
from fedspan.metrics._collected import Ranking


@register
class AveragePrecision(Ranking):
    """Of one score, or the mean over classes, each against the others."""

    def of_ranks(self, positives: torch.Tensor, negatives: torch.Tensor) -> torch.Tensor:
        right, wrong = positives.flip(0), negatives.flip(0)
        precision = right.cumsum(0) / (right + wrong).cumsum(0)
        return (right * precision).sum() / right.sum()
