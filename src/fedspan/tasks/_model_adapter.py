"""How a model's examples are read, what is minimized on them, and how the model is evaluated.

A Hugging Face model without a given loss is trained by its own, on tokenized text. Any other model is trained on
(inputs, targets) by `loss(outputs, targets)`, or by `objective(model, batch)` on whatever a batch is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F  # noqa: N812
from torch import nn

from fedspan.core.config import Settings
from fedspan.huggingface.models import about, is_pretrained, own_loss, prepare, score_of, usual_metrics
from fedspan.huggingface.text_data import as_texts, by_length
from fedspan.nn.client_data import ClientData, Loss, as_client_data
from fedspan.nn.evaluate import Evaluator, OutputLoss, by_objective, by_outputs
from fedspan.nn.problem import Evaluate


@dataclass(frozen=True, eq=False)
class ModelAdapter:
    """What a kind of model is trained and evaluated by."""

    client_data: Callable[[Any, str], ClientData]  # from what a user gives, and whose it is
    objective: Loss
    on: Callable[[ClientData], Evaluate]

    def evaluator(self, test: Any, name: str = "test set") -> Evaluate | None:
        """The evaluation on a test set as a user gives it; None where there is none."""
        return None if test is None else self.on(self.client_data(test, name))


def model_adapter(
    model: nn.Module, settings: Settings, loss: OutputLoss | None = None, objective: Loss | None = None
) -> ModelAdapter:
    """Chooses by the model: its own loss for a Hugging Face model, otherwise the given one, or cross-entropy."""
    metrics, device = settings.metrics, settings.torch_device
    if is_pretrained(model) and loss is None and objective is None:
        known = about(prepare(model))
        return ModelAdapter(
            lambda data, who: as_texts(data, known, who),
            own_loss,
            lambda test: Evaluator(
                test, score_of(known), metrics, device, usual_metrics(known), by_length(test, known)
            ),
        )
    measure = loss or F.cross_entropy
    score = by_outputs(measure) if objective is None else by_objective(objective, bool(metrics))
    return ModelAdapter(
        as_client_data,
        objective or (lambda model, batch: measure(model(batch[0]), batch[1])),
        lambda test: Evaluator(test, score, metrics, device),
    )
