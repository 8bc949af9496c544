"""AUROC: the probability that a random positive example is scored above a random negative one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fedspan.core.registry import register
from fedspan.metrics._collected import Ranking


@register
@dataclass(eq=False)
class AUROC(Ranking):
    """Of one score, or the mean over classes, each against the others."""

    def of_class(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        from torchmetrics.functional.classification import binary_auroc

        return binary_auroc
