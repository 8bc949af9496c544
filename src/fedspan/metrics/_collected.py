"""What metrics share: they keep what they need of every batch, and compute once, in float64."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fedspan.core.errors import FedspanError, SpecError, one_line
from fedspan.core.metric import IGNORED, Metric

Tensor = torch.Tensor


class Collected(Metric):
    """A metric of what is kept of all batches: tensors, to which the rows of the next batch are appended.

    `summary` and `pooled` are those of a mean over examples, or over their outputs or tokens; others replace them.
    """

    logits: bool | None = None  # whether one score per target is a logit; None: not known

    def __init__(self) -> None:
        self._kept: list[list[Tensor]] = []

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Keep what is needed of a batch."""
        self._kept.append([part.cpu() for part in self.kept(outputs.detach(), targets.detach())])

    def tensors(self) -> list[Tensor]:
        """Return what was kept of all batches."""
        return [torch.cat(parts) for parts in zip(*self._kept, strict=True)]

    def compute(self) -> float:
        """Return the metric over all batches."""
        return float(self.value(*self.tensors()))

    def summary(self) -> Tensor | None:
        """Return values whose sums over several clients give the metric of all their examples.

        None: only the examples themselves do.
        """
        count = self.tensors()[1].numel()
        return torch.tensor([self.compute() * count, count], dtype=torch.float64)

    @classmethod
    def pooled(cls, total: Tensor) -> float:
        """Return the metric of all clients' examples, from the sum of their summaries."""
        return float(total[0] / total[1])

    def kept(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is needed of a batch."""
        return outputs, targets

    @abstractmethod
    def value(self, outputs: Tensor, targets: Tensor) -> Tensor | float:
        """Return the metric of what was kept."""


class Labels(Collected):
    """A metric of predicted and true labels: of classes, of yes or no, or of several labels per example."""

    def kept(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return classes where they count, or one score per target."""
        targets = without_column(targets)
        if by_class(outputs, targets):
            counted = targets != IGNORED
            return outputs.argmax(1)[counted], targets[counted]
        scores = one_score(outputs, targets)
        return (scores, targets) if targets.dim() == 2 else (scores.flatten(), targets.flatten())

    def labels(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return predicted and true labels: yes is a logit above 0, or a probability above 0.5."""
        if outputs.is_floating_point():
            outside = bool(((outputs < 0) | (outputs > 1)).any())
            threshold = 0.0 if (outside if self.logits is None else self.logits) else 0.5
            outputs, targets = outputs > threshold, targets > 0.5
        return outputs.long(), targets.long()

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the metric of what was kept."""
        return self.of_labels(*self.labels(outputs, targets))

    @abstractmethod
    def of_labels(self, predicted: Tensor, actual: Tensor) -> Tensor:
        """Return the metric of labels, (n,) or (n, labels)."""


def one_number(call: Callable[[], Any], what: str, arguments: str, trains: bool = False) -> float:
    """Return what a function of one's own returns, if it is one number; a loss that trains must have a gradient."""
    try:
        value = call()
    except FedspanError:
        raise
    except Exception as error:
        raise SpecError(
            f"{what} must be a function of {arguments}; it fails with {one_line(error)}"
        ) from error
    tensor = value
    if not trains and isinstance(value, bool | int | float | complex | np.ndarray | np.generic):
        tensor = torch.as_tensor(np.asarray(value))
    if not isinstance(tensor, Tensor):
        found = "None" if value is None else f"a {type(value).__name__}"
    elif tensor.numel() != 1:
        found = f"the shape {tuple(tensor.shape)}; take its mean"
    elif tensor.is_complex() or (trains and not tensor.is_floating_point()):
        found = f"a tensor of {tensor.dtype}"
    elif trains and not tensor.requires_grad:
        found = "a tensor without a gradient; leave out detach(), item() and no_grad()"
    else:
        return float(tensor.detach())
    raise SpecError(f"{what} must return one number{' as a tensor' if trains else ''}, got {found}")


def by_class(outputs: Tensor, targets: Tensor) -> bool:
    """Return whether there is a score for each class."""
    return outputs.dim() == targets.dim() + 1 and outputs.shape[1] > 1


def fitting(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return outputs in the shape of the targets, of which there are as many."""
    if outputs.numel() != targets.numel():
        raise SpecError(f"the metric needs one output per target, got {shapes(outputs, targets)}")
    return outputs.reshape(targets.shape)


def numbers(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and targets of a metric of numbers, in float64."""
    return fitting(outputs, targets).double(), targets.double()


def without_column(targets: Tensor) -> Tensor:
    """Return targets in one column as flat ones."""
    return targets.flatten() if targets.dim() == 2 and targets.shape[1] == 1 else targets


def one_score(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return one score per target, in the shape of the targets."""
    scores, outside = fitting(outputs, targets), targets[(targets < 0) | (targets > 1)]
    if len(outside):
        raise SpecError(
            f"with one output per target, targets must be 0 or 1, got {outside[0].item():g}"
        )
    return scores


def shapes(outputs: Tensor, targets: Tensor) -> str:
    """Return the two shapes in words."""
    return f"outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(targets.shape)}"
