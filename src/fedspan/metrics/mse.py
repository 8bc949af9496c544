"""Mean squared error: the mean of (output − target)²."""

from __future__ import annotations

import torch

from fedspan.core.registry import register
from fedspan.metrics._collected import Collected, numbers


@register
class MSE(Collected):
    """Over all outputs."""

    higher_is_better = False

    def value(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        outputs, targets = numbers(outputs, targets)
        return (outputs - targets).square().mean()
