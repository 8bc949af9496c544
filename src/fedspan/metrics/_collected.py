"""What metrics share: they keep what they need of every batch, and compute once, in float64."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from fedspan.core.errors import FedspanError, SpecError, one_line
from fedspan.core.metric import IGNORED, Metric

Tensor = torch.Tensor
BINS = 8192  # of scores, in the summary of a metric of ranks


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


class Ranks(Collected):
    """A metric of how scores order examples: the mean over the classes or labels that occur and are not all.

    Clients send how many examples of each kind have a score in each bin.
    """

    needs = "examples of at least two classes"  # where it is not NaN

    @staticmethod
    @abstractmethod
    def of(positives: Tensor, negatives: Tensor) -> Tensor:
        """Return the metric of one class, from the examples in it and not in it at each score, lowest first."""

    @classmethod
    def mean(cls, counts: Iterable[Sequence[Tensor]]) -> float:
        """Return the mean over classes."""
        both = [(inside, others) for inside, others in counts if inside.any() and others.any()]
        return sum(float(cls.of(*one)) for one in both) / len(both) if both else math.nan

    def value(self, outputs: Tensor, targets: Tensor) -> float:
        """Return the metric of what was kept."""
        counts = []
        for column, inside in ranked(outputs, targets):
            _, place, count = column.unique(return_inverse=True, return_counts=True)
            positives = torch.bincount(place, weights=inside.double(), minlength=len(count))
            counts.append((ordered(column, positives), count - positives))
        return self.mean(counts)

    def summary(self) -> Tensor:
        """Return for each class the examples in it, and not in it, by bins of their scores."""
        found = []
        for column, inside in ranked(*self.tensors()):
            squeezed = column / (1 + column.abs())  # between −1 and 1, in the same order
            bins = ((squeezed + 1) / 2 * BINS).nan_to_num().clamp(0, BINS - 1).long()
            counts = [torch.bincount(bins[part], minlength=BINS) for part in (inside, ~inside)]
            found += [ordered(column, one.double()) for one in counts]
        return torch.cat(found)

    @classmethod
    def pooled(cls, total: Tensor) -> float:
        """Return the metric of the bins."""
        return cls.mean(both[:, both.any(0)] for both in total.reshape(-1, 2, BINS))


def ranked(outputs: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return for each class or label the scores of the examples, and which of them are in it.

    Only the order of scores counts. Where the model has an output per class, a class is ranked by its log-odds
    z_k - log Σ_{j≠k} exp(z_j), which order examples as softmax does and never saturate.
    """
    if by_class(outputs, targets):
        scores, targets = outputs.double().movedim(1, -1).flatten(0, -2), targets.flatten()
        scores, targets = scores[targets != IGNORED], targets[targets != IGNORED]
        classes = range(scores.shape[1])
        if not are_probabilities(scores):
            rest = [torch.cat([scores[:, :k], scores[:, k + 1 :]], 1) for k in classes]
            scores = scores - torch.stack([others.logsumexp(1) for others in rest], 1)
        there = torch.stack([targets == k for k in classes], 1)
    else:
        scores = one_score(outputs, targets).double().reshape(len(targets), -1)
        there = (targets > 0.5).reshape(len(targets), -1)
    return list(zip(scores.T, there.T, strict=True))


def ordered(scores: Tensor, counts: Tensor) -> Tensor:
    """Return counts of examples, which are NaN if not all scores are finite: those have no order."""
    return counts.where(torch.isfinite(scores).all(), math.nan)


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


def are_probabilities(outputs: Tensor) -> bool:
    """Return whether the scores of all examples are class probabilities, and not logits."""
    ones = outputs.new_ones(())
    return bool((outputs >= 0).all()) and torch.allclose(outputs.sum(1), ones, atol=1e-5)


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
