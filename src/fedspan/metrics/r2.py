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

    def summary(self) -> torch.Tensor:
        """Return for each output count, Σy, Σy² and the squared errors."""
        outputs, targets = (one.reshape(len(one), -1) for one in numbers(*self.tensors()))
        count = torch.full_like(targets[0], len(targets))
        squares = targets.square().sum(0), (targets - outputs).square().sum(0)
        return torch.stack([count, targets.sum(0), *squares], 1).flatten()

    @classmethod
    def pooled(cls, total: torch.Tensor) -> float:
        """Return 1 − errors / (Σy² − (Σy)² / count), the mean over outputs."""
        count, y, squares, errors = total.reshape(-1, 4).T
        return float((1 - errors / (squares - y.square() / count)).mean())
