"""Macro F1: the mean over classes of 2 · right / (predicted + actual), so that rare classes count as much."""

from __future__ import annotations

import torch

from fedspan.core.registry import register
from fedspan.metrics._collected import Labels


@register
class F1Macro(Labels):
    """The mean over classes that are seen or predicted; with several labels per example, over the labels."""

    def of_labels(self, predicted: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
        if actual.dim() == 2:
            right, both = (predicted & actual).sum(0).double(), predicted.sum(0) + actual.sum(0)
        else:
            classes = int(torch.cat([predicted, actual]).max()) + 1
            right = torch.bincount(actual[predicted == actual], minlength=classes).double()
            both = torch.bincount(predicted, minlength=classes) + torch.bincount(
                actual, minlength=classes
            )
        return (2 * right[both > 0] / both[both > 0]).mean()
