"""How a model's examples are read, what is minimised on them, and how the model is scored.

A Hugging Face model is trained by its own loss, on tokenised text, unless a loss is given; any other model on (inputs,
targets) by `loss(outputs, targets)`, or by `objective(model, batch)` on whatever a batch is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from fedspan.nn.pretrained import about, is_pretrained, own_loss, ready
from fedspan.nn.problem import Evaluate
from fedspan.nn.score import scorer
from fedspan.nn.source import Loss, Source, as_source
from fedspan.nn.text_score import text_scorer
from fedspan.nn.texts import as_texts

OutputLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Reading:
    """What a kind of model is trained and scored by."""

    source: Callable[[Any, str], Source]  # from what a user gives, and whose it is
    objective: Loss
    scorer: Callable[[Source], Evaluate]

    def score(self, test: Any) -> Evaluate | None:
        """The score on a test set as a user gives it; None where there is none."""
        return None if test is None else self.scorer(self.source(test, "test set"))


def reading(
    model: nn.Module, device: torch.device, loss: OutputLoss | None = None, objective: Loss | None = None
) -> Reading:
    """By the model's own loss where it is one of transformers, or else by the one given, usually cross-entropy."""
    if is_pretrained(model) and loss is None and objective is None:
        known = about(ready(model))
        return Reading(
            lambda data, who: as_texts(data, known, who), own_loss, lambda test: text_scorer(test, known, device)
        )
    measure = loss or F.cross_entropy
    usual: Loss = lambda m, b: measure(m(b[0]), b[1])  # noqa: E731
    return Reading(as_source, objective or usual, lambda test: scorer(test, measure, objective, device))
