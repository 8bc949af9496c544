"""R²: the share of the targets' variance that the outputs explain."""

from __future__ import annotations

import torch

from fedspan.core.registry import register
from fedspan.metrics._collected import Collected, numbers


@register
class R2(Collected):
    """The mean over outputs, where there are several."""

    needs = "targets that differ"

    def value(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        outputs, targets = numbers(outputs, targets)
        left = (targets - outputs).square().sum(0)
        return (1 - left / (targets - targets.mean(0)).square().sum(0)).mean()
