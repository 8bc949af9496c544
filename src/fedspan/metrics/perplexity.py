"""Perplexity: e to the mean cross-entropy per token, the number of tokens a language model hesitates between."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812

from fedspan.core.errors import SpecError
from fedspan.core.metric import IGNORED, Metric
from fedspan.core.registry import register
from fedspan.metrics._collected import by_class, shapes

HIGHEST = 700.0  # of a mean cross-entropy; e to more than that is not a number


@register
@dataclass(eq=False)
class Perplexity(Metric):
    """Of the tokens that count, each with the same weight."""

    higher_is_better: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._total, self._count = 0.0, 0

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Adds the cross-entropy of a batch."""
        if not by_class(outputs, targets) or targets.is_floating_point():
            raise SpecError(
                f"`perplexity` needs a score per token and whole numbers as targets, got {shapes(outputs, targets)}"
            )
        count = int((targets != IGNORED).sum())
        if count:
            scores = outputs.movedim(1, -1).flatten(0, -2).float()
            mean = F.cross_entropy(scores, targets.flatten(), ignore_index=IGNORED)
            self._total, self._count = self._total + float(mean) * count, self._count + count

    def compute(self) -> float:
        """Over all batches."""
        return math.exp(min(self._total / self._count, HIGHEST)) if self._count else math.nan
