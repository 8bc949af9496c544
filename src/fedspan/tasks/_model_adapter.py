"""How a model's examples are read, what is minimized on them, and how the model is scored.

A Hugging Face model is trained by its own loss, on tokenized text, unless a loss is given; any other model on (inputs,
targets) by `loss(outputs, targets)`, or by `objective(model, batch)` on whatever a batch is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from fedspan.huggingface.models import about, is_pretrained, own_loss, ready
from fedspan.huggingface.text_data import as_texts
from fedspan.huggingface.text_scores import text_scorer
from fedspan.nn.client_data import ClientData, Loss, as_client_data
from fedspan.nn.problem import Evaluate
from fedspan.nn.score import scorer

OutputLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False)
class ModelAdapter:
    """What a kind of model is trained and scored by."""

    source: Callable[[Any, str], ClientData]  # from what a user gives, and whose it is
    objective: Loss
    scorer: Callable[[ClientData], Evaluate]

    def score(self, test: Any) -> Evaluate | None:
        """The score on a test set as a user gives it; None where there is none."""
        return None if test is None else self.scorer(self.source(test, "test set"))


def model_adapter(
    model: nn.Module, device: torch.device, loss: OutputLoss | None = None, objective: Loss | None = None
) -> ModelAdapter:
    """By the model's own loss where it is one of transformers, or else by the one given, usually cross-entropy."""
    if is_pretrained(model) and loss is None and objective is None:
        known = about(ready(model))
        return ModelAdapter(
            lambda data, who: as_texts(data, known, who), own_loss, lambda test: text_scorer(test, known, device)
        )
    measure = loss or F.cross_entropy
    usual: Loss = lambda m, b: measure(m(b[0]), b[1])  # noqa: E731
    return ModelAdapter(as_client_data, objective or usual, lambda test: scorer(test, measure, objective, device))
