"""Average precision: the area under the precision-recall curve, for classes with few positive examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fedspan.core.registry import register
from fedspan.metrics._collected import Ranking


@register
@dataclass(eq=False)
class AveragePrecision(Ranking):
    """Of one score, or the mean over classes, each against the others."""

    def of_class(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        from torchmetrics.functional.classification import binary_average_precision

        return binary_average_precision
