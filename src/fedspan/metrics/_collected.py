"""What metrics share: they collect outputs and targets, and compute once, in float64."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedspan.core.errors import FedspanError, SpecError, one_line
from fedspan.core.metric import IGNORED, Metric

Tensor = torch.Tensor


@dataclass(eq=False)
class Collected(Metric):
    """A metric of all outputs and targets at once."""

    def __post_init__(self) -> None:
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
    """A metric of numbers: outputs and targets have as many."""

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor | float:
        """In float64."""
        if outputs.numel() != targets.numel():
            raise SpecError(f"a metric of numbers needs one output per target, got {_shapes(outputs, targets)}")
        return self.of_numbers(outputs.double().reshape(targets.shape), targets.double())

    @abstractmethod
    def of_numbers(self, outputs: Tensor, targets: Tensor) -> Tensor | float:
        """The metric of outputs and targets of one shape."""


class Labels(Collected):
    """A metric of predicted and true labels: of classes, of yes or no, or of several labels per example."""

    logits: bool | None = None  # whether one score per target is a logit; None: unless all are in [0, 1]

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Keeps the predicted classes, or one score per target."""
        targets = targets.flatten() if targets.dim() == 2 and targets.shape[1] == 1 else targets
        super().update(outputs.argmax(1) if by_class(outputs, targets) else one_score(outputs, targets), targets)

    def compute(self) -> float:
        """Batches may differ in length, and some targets may not count."""
        several = all(targets.dim() == 2 and outputs.is_floating_point() for outputs, targets in self._kept)
        if not several:
            counted = [targets != IGNORED for _, targets in self._kept]
            self._kept = [(o[c], t[c]) for (o, t), c in zip(self._kept, counted, strict=True)]
        return super().compute()

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor | float:
        """Yes is a logit above 0, or a probability above 0.5."""
        if outputs.is_floating_point():
            logits = self.logits if self.logits is not None else not bool(((outputs >= 0) & (outputs <= 1)).all())
            outputs = outputs > (0.0 if logits else 0.5)
        return self.of_labels(outputs.long(), targets.long())

    @abstractmethod
    def of_labels(self, predicted: Tensor, actual: Tensor) -> Tensor | float:
        """The metric of labels, (n,) or (n, labels)."""


class Ranking(Collected):
    """A metric of how scores order examples, as the mean over classes or labels that occur and are not all there is."""

    def value(self, outputs: Tensor, targets: Tensor) -> float:
        """One class against the others, for each."""
        if by_class(outputs, targets):
            sums = outputs.sum(1)
            outputs = outputs if torch.allclose(sums, torch.ones_like(sums)) else outputs.double().softmax(1)
            targets = torch.nn.functional.one_hot(targets, outputs.shape[1])
        else:
            outputs = one_score(outputs, targets)
        of_class = self.of_class()
        columns = zip(outputs.reshape(len(outputs), -1).T, targets.long().reshape(len(targets), -1).T, strict=True)
        found = [float(of_class(score, there)) for score, there in columns if 0 < int(there.sum()) < len(there)]
        return sum(found) / len(found) if found else float("nan")

    @abstractmethod
    def of_class(self) -> Callable[[Tensor, Tensor], Tensor]:
        """The metric of one class: (scores, whether it is there) → a number."""


class Function(Collected):
    """A function (outputs, targets) → number of one's own."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor | float]) -> None:
        super().__init__()
        self.function = function

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor | float:
        """What the function returns for all outputs and targets."""
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return one_number(lambda: self.function(outputs, targets), f"`metrics` {name}", "(outputs, targets)")


def one_number(call: Callable[[], Any], what: str, arguments: str, trains: bool = False) -> float:
    """What a function of one's own returns, if it is one number; a loss that trains returns it with a gradient."""
    try:
        value = call()
    except FedspanError:
        raise
    except Exception as error:
        raise SpecError(f"{what} must be a function of {arguments}; it fails with {one_line(error)}") from error
    tensor = value if trains or isinstance(value, Tensor) else torch.as_tensor(value) if _plain(value) else None
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


def by_class(outputs: Tensor, targets: Tensor) -> bool:
    """Whether there is a score for each class."""
    return outputs.dim() == targets.dim() + 1 and outputs.shape[1] > 1


def one_score(outputs: Tensor, targets: Tensor) -> Tensor:
    """One score per target, in the shape of the targets."""
    if outputs.numel() != targets.numel():
        raise SpecError(f"targets must be class numbers or 0 and 1 for each output, got {_shapes(outputs, targets)}")
    if int(targets.min()) < 0 or int(targets.max()) > 1:
        raise SpecError(f"with one output per target, targets must be 0 or 1, got {targets.max().item():g}")
    return outputs.reshape(targets.shape)


def _shapes(outputs: Tensor, targets: Tensor) -> str:
    return f"outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(targets.shape)}"
