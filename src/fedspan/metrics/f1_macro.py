"""Macro F1: the mean over classes of 2 · right / (predicted + actual), so that rare classes count as much."""

from __future__ import annotations

import torch

from fedspan.core.registry import register
from fedspan.metrics._collected import Labels


@register
class F1Macro(Labels):
    """The mean over classes that are seen or predicted; with several labels per example, over the labels."""

    def of_labels(self, predicted: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
        return f1_of(*counts(predicted, actual))

    def summary(self) -> torch.Tensor:
        """Return for each class how often it was right, and how often predicted or actual."""
        return torch.stack(counts(*self.labels(*self.tensors())), 1).flatten()

    @staticmethod
    def pooled(total: torch.Tensor) -> float:
        """Return the mean over classes."""
        return float(f1_of(*total.reshape(-1, 2).T))


def counts(predicted: torch.Tensor, actual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each class or label how often it was right, and how often predicted or actual."""
    if actual.dim() == 2:
        return (predicted & actual).sum(0).double(), (predicted.sum(0) + actual.sum(0)).double()
    classes = int(torch.cat([predicted, actual]).max()) + 1
    right, *both = (
        torch.bincount(one, minlength=classes).double()
        for one in (actual[predicted == actual], predicted, actual)
    )
    return right, both[0] + both[1]


def f1_of(right: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
    """Return the mean of 2 · right / (predicted + actual) over the classes that are seen or predicted."""
    return (2 * right[both > 0] / both[both > 0]).mean()
