"""Accuracy: the share of right labels, of classes, of yes or no by one score, or of several labels per example."""

from __future__ import annotations

import torch

from fedspan.core.registry import register
from fedspan.metrics._collected import Labels


@register
class Accuracy(Labels):
    """Right labels / labels that count."""

    def of_labels(self, predicted: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
        return (predicted == actual).double().mean()
