"""Macro F1: the mean over classes of 2 · right / (predicted + actual), so that rare classes count as much."""

from __future__ import annotations

import torch

from fedspan.core.registry import register
from fedspan.metrics._collected import Labels


@register
class F1Macro(Labels):
    """The mean over classes that are seen or predicted; with several labels per example, over the labels."""

    def of_labels(self, predicted: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
        return f1_of(counts(predicted, actual))

    def summary(self) -> torch.Tensor:
        """Return for each class how often it was right, and how often predicted or actual."""
        return counts(*self.labels(*self.tensors())).flatten()

    @classmethod
    def pooled(cls, total: torch.Tensor) -> float:
        """Return the mean over classes."""
        return float(f1_of(total.reshape(-1, 2)))


def counts(predicted: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
    """Return for each class or label how often it was right, and how often predicted or actual, (classes, 2)."""
    if actual.dim() == 2:
        right, said, true = (one.sum(0) for one in (predicted & actual, predicted, actual))
    else:
        classes = int(torch.cat([predicted, actual]).max()) + 1
        right, said, true = (
            torch.bincount(one, minlength=classes)
            for one in (actual[predicted == actual], predicted, actual)
        )
    return torch.stack([right, said + true], 1).double()


def f1_of(found: torch.Tensor) -> torch.Tensor:
    """Return the mean of 2 · right / (predicted + actual) over the classes that are seen or predicted."""
    right, both = found[found[:, 1] > 0].unbind(1)
    return (2 * right / both).mean()
