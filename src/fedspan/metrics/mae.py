"""Mean absolute error: the mean of |output − target|."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedspan.core.registry import register
from fedspan.metrics._collected import Regression


@register
@dataclass(eq=False)
class MAE(Regression):
    """Over all outputs."""

    higher_is_better: ClassVar[bool] = False

    def of_numbers(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        from torchmetrics.functional.regression import mean_absolute_error

        return mean_absolute_error(outputs, targets)
