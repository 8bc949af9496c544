"""Concordance index: how often the one of two whose event comes first has the higher risk (Harrell et al. 1982).

For Cox models: outputs are risks, targets have two columns, the time and whether the event was seen (1) or the
observation ended before it (0). A pair counts if it is known who came first; equal risks count half.
"""

from __future__ import annotations

import torch

from fedspan.core.errors import SpecError
from fedspan.core.registry import register
from fedspan.metrics._collected import Collected, shapes

ROWS = 1024  # compared with all others at a time


@register
class CIndex(Collected):
    """Concordant pairs / comparable pairs."""

    def summary(self) -> None:
        """Return nothing: pairs are of examples of two clients too."""

    def value(self, outputs: torch.Tensor, targets: torch.Tensor) -> float:
        if targets.dim() != 2 or targets.shape[1] != 2 or outputs.numel() != len(targets):
            raise SpecError(
                f"`c_index` needs one risk per example and targets (time, event), got {shapes(outputs, targets)}"
            )
        risk, time, event = outputs.double().flatten(), targets[:, 0].double(), targets[:, 1] > 0
        right, pairs = 0.0, 0
        for part in torch.nonzero(event).flatten().split(ROWS):
            first = (time[part, None] < time) | ((time[part, None] == time) & ~event)
            above, equal = risk[part, None] > risk, risk[part, None] == risk
            right += float((first & above).sum()) + 0.5 * float((first & equal).sum())
            pairs += int(first.sum())
        return right / pairs if pairs else float("nan")
