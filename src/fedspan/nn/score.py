"""Scoring a model on a test set: mean loss, and the share of right answers where targets are classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from fedspan.nn.client_data import Batch, ClientData, Loss, placed

AT_ONCE = 512  # examples scored at a time


def scorer(
    test: ClientData, loss: Callable[..., torch.Tensor], objective: Loss | None, device: torch.device
) -> Callable[[nn.Module], Mapping[str, float]]:
    """A function that scores a model; `objective(model, batch)` replaces `loss(outputs, targets)` where it is given."""

    def score(model: nn.Module) -> dict[str, float]:
        total, right, classes = 0.0, 0, True
        for part in torch.arange(len(test)).split(AT_ONCE):
            batch: Batch = placed(test.take(part), device)
            if objective is not None:
                total += float(objective(model, batch)) * len(part)
                classes = False
                continue
            inputs, targets = batch
            outputs = model(inputs)
            total += float(loss(outputs, targets)) * len(part)
            classes = classes and not targets.is_floating_point() and outputs.dim() == 2 and targets.dim() == 1
            right += int((outputs.argmax(1) == targets).sum()) if classes else 0
        found = {"loss": total / len(test)}
        return found | {"accuracy": right / len(test)} if classes else found

    return score
