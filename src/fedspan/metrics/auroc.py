"""AUROC: the probability that a random positive example is scored above a random negative one; a tie counts half."""

from __future__ import annotations

import torch

from fedspan.core.registry import register
from fedspan.metrics._collected import Ranks


def auroc(positives: torch.Tensor, negatives: torch.Tensor) -> torch.Tensor:
    """Return the area under the curve, from the examples of each kind at each score."""
    below = negatives.cumsum(0) - negatives / 2
    return (positives * below).sum() / (positives.sum() * negatives.sum())


@register
class AUROC(Ranks):
    """Of one score, or the mean over classes, each against the others."""

    of = staticmethod(auroc)
