"""Perplexity: e to the mean cross-entropy per token, the number of tokens a language model hesitates between."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812

from fedspan.core.errors import SpecError
from fedspan.core.metric import IGNORED
from fedspan.core.registry import register
from fedspan.metrics._collected import Collected, by_class, shapes

HIGHEST = 700.0  # of a mean cross-entropy; e to more than that is not a number


@register
class Perplexity(Collected):
    """Of the tokens that count, each with the same weight."""

    higher_is_better = False

    def kept(
        self, outputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cross-entropy of a batch, and its tokens."""
        if not by_class(outputs, targets) or targets.is_floating_point():
            raise SpecError(
                f"`perplexity` needs a score per token and whole numbers as targets, got {shapes(outputs, targets)}"
            )
        count = (targets != IGNORED).sum()[None]
        scores = outputs.movedim(1, -1).flatten(0, -2).float()
        mean = F.cross_entropy(scores, targets.flatten(), ignore_index=IGNORED)  # nan of nothing
        return torch.where(count > 0, mean.double() * count, 0.0), count

    def value(self, outputs: torch.Tensor, targets: torch.Tensor) -> float:
        """Return e to the sum over batches / tokens."""
        return self.pooled(self.summary())

    def summary(self) -> torch.Tensor:
        """Return the sum over tokens, and how many there are."""
        sums, counts = self.tensors()
        return torch.tensor([sum(sums.tolist()), int(counts.sum())], dtype=torch.float64)

    @classmethod
    def pooled(cls, total: torch.Tensor) -> float:
        """Return e to the sum / tokens."""
        return math.exp(min(float(total[0] / total[1]), HIGHEST)) if total[1] else math.nan
