"""What metrics share: they collect outputs and targets, and compute once, in float64."""

from __future__ import annotations

import importlib
import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from fedspan.core.errors import FedspanError, SpecError, one_line
from fedspan.core.metric import IGNORED, Metric

Tensor = torch.Tensor


@dataclass(eq=False)
class Collected(Metric):
    """A metric of all outputs and targets at once."""

    def __post_init__(self) -> None:
        self.logits: bool | None = None  # whether one score per target is a logit; None: not known
        self._kept: list[tuple[Tensor, Tensor]] = []

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Keeps a batch."""
        self._kept.append((outputs.detach().cpu(), targets.detach().cpu()))

    def compute(self) -> float:
        """The metric over all batches."""
        outputs, targets = (torch.cat(parts) for parts in zip(*self._kept, strict=True))
        return float(self.value(outputs, targets))

    @abstractmethod
    def value(self, outputs: Tensor, targets: Tensor) -> Tensor | float:
        """The metric of these outputs and targets."""


class Regression(Collected):
    """A metric of numbers, by a function of torchmetrics: outputs and targets have as many."""

    function: ClassVar[str]

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor | float:
        """In float64."""
        if outputs.numel() != targets.numel():
            raise SpecError(
                f"a metric of numbers needs one output per target, got {shapes(outputs, targets)}"
            )
        library = importlib.import_module("torchmetrics.functional.regression")
        compute = getattr(library, self.function)
        found: Tensor = compute(outputs.double().reshape(targets.shape), targets.double())
        return found


class Labels(Collected):
    """A metric of predicted and true labels: of classes, of yes or no, or of several labels per example."""

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Keeps the predicted classes, or one score per target."""
        targets = targets.flatten() if targets.dim() == 2 and targets.shape[1] == 1 else targets
        super().update(
            outputs.argmax(1) if by_class(outputs, targets) else one_score(outputs, targets),
            targets,
        )

    def compute(self) -> float:
        """Batches may differ in length, and some targets may not count."""
        several = all(
            targets.dim() == 2 and outputs.is_floating_point() for outputs, targets in self._kept
        )
        if not several:
            counted = [targets != IGNORED for _, targets in self._kept]
            self._kept = [(o[c], t[c]) for (o, t), c in zip(self._kept, counted, strict=True)]
        return super().compute()

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor | float:
        """Yes is a logit above 0, or a probability above 0.5, of outputs and of targets alike."""
        if outputs.is_floating_point():
            logits = (
                self.logits
                if self.logits is not None
                else not bool(((outputs >= 0) & (outputs <= 1)).all())
            )
            outputs, targets = outputs > (0.0 if logits else 0.5), targets > 0.5
        return self.of_labels(outputs.long(), targets.long())

    @abstractmethod
    def of_labels(self, predicted: Tensor, actual: Tensor) -> Tensor | float:
        """The metric of labels, (n,) or (n, labels)."""


class Ranking(Collected):
    """A metric of how scores order examples, as the mean over classes or labels that occur and are not all there is.

    Only the order of scores counts. Where the model has an output per class, a class is ranked by its log-odds
    z_k - log Σ_{j≠k} exp(z_j), which order examples as softmax does and never saturate.
    """

    needs: ClassVar[str] = "examples of at least two classes"  # where it is not NaN

    def value(self, outputs: Tensor, targets: Tensor) -> float:
        """One class against the others, for each."""
        outputs = outputs.double()
        if by_class(outputs, targets):
            outputs, targets = outputs.movedim(1, -1).flatten(0, -2), targets.flatten()
            outputs, targets = outputs[targets != IGNORED], targets[targets != IGNORED]
            columns = [(_log_odds(outputs, k), targets == k) for k in range(outputs.shape[1])]
        else:
            scores, there = (
                part.reshape(len(targets), -1).T
                for part in (one_score(outputs, targets), targets > 0.5)
            )
            columns = list(zip(scores, there, strict=True))
        found = [self._of_column(*one) for one in columns if 0 < int(one[1].sum()) < len(one[1])]
        return sum(found) / len(found) if found else math.nan

    def _of_column(self, scores: Tensor, there: Tensor) -> float:
        if not torch.isfinite(scores).all():
            return math.nan
        _, place, count = scores.unique(return_inverse=True, return_counts=True)
        positives = torch.bincount(place, weights=there.double(), minlength=len(count))
        return self.of_ranks(positives, count - positives)

    @abstractmethod
    def of_ranks(self, positives: Tensor, negatives: Tensor) -> float:
        """The metric of one class, from the numbers of examples in it and not in it at each score, lowest first."""


def _log_odds(outputs: Tensor, k: int) -> Tensor:
    """Scores of class k against the others; probabilities are scores already."""
    if are_probabilities(outputs):
        return outputs[:, k]
    others = torch.cat([outputs[:, :k], outputs[:, k + 1 :]], 1)
    return outputs[:, k] - others.logsumexp(1)


def one_number(call: Callable[[], Any], what: str, arguments: str, trains: bool = False) -> float:
    """What a function of one's own returns, if it is one number; a loss that trains returns it with a gradient."""
    try:
        value = call()
    except FedspanError:
        raise
    except Exception as error:
        raise SpecError(
            f"{what} must be a function of {arguments}; it fails with {one_line(error)}"
        ) from error
    tensor = (
        value
        if trains or isinstance(value, Tensor)
        else torch.as_tensor(np.asarray(value))
        if _plain(value)
        else None
    )
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


def _plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | complex | np.ndarray | np.number | np.bool_)


def are_probabilities(outputs: Tensor) -> bool:
    """Whether the scores of all examples are class probabilities, and not logits."""
    ones = outputs.new_ones(())
    return bool((outputs >= 0).all()) and torch.allclose(outputs.sum(1), ones, atol=1e-5)


def by_class(outputs: Tensor, targets: Tensor) -> bool:
    """Whether there is a score for each class."""
    return outputs.dim() == targets.dim() + 1 and outputs.shape[1] > 1


def one_score(outputs: Tensor, targets: Tensor) -> Tensor:
    """One score per target, in the shape of the targets."""
    if outputs.numel() != targets.numel():
        raise SpecError(
            f"targets must be class numbers or 0 and 1 for each output, got {shapes(outputs, targets)}"
        )
    outside = targets[(targets < 0) | (targets > 1)]
    if len(outside):
        raise SpecError(
            f"with one output per target, targets must be 0 or 1, got {outside[0].item():g}"
        )
    return outputs.reshape(targets.shape)


def shapes(outputs: Tensor, targets: Tensor) -> str:
    """The two shapes in words."""
    return f"outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(targets.shape)}"
