"""R²: the share of the targets' variance that the outputs explain."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedspan.core.registry import register
from fedspan.metrics._collected import Regression


@register
@dataclass(eq=False)
class R2(Regression):
    """The mean over outputs, where there are several."""

    def of_numbers(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        from torchmetrics.functional.regression import r2_score

        return r2_score(outputs, targets)
