"""Evaluating a model on a test set: its loss, and the metrics that are asked for or usual for the kind of problem."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fedspan.core.errors import SpecError
from fedspan.metrics._collected import Collected, by_class
from fedspan.metrics._own import chosen
from fedspan.nn.batches import Batch, ClientData, Loss, placed
from fedspan.nn.problem_kind import OutputLoss

AT_ONCE = 512  # examples evaluated at a time


@dataclass(frozen=True, eq=False)
class Scored:
    """A model on one batch. The loss is a mean over `count` examples or tokens."""

    loss: torch.Tensor
    count: int
    outputs: Any = None
    targets: Any = None


Score = Callable[[nn.Module, Batch], Scored]


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Evaluates a model on a test set: `evaluator(model)` gives the loss and the metrics by name.

    Args:
        data: The test set.
        score: Applies the model to a batch.
        metrics: What to compute: names, `Metric` objects or functions of (outputs, targets). None takes the usual ones.
        device: Where the model is.
        usual: The names of the usual metrics. None: accuracy where there is an output per class.
        parts: Which examples to evaluate together. None: as many as usual, in order.
        logits: Whether one output per target is a logit or a probability. None: found from the outputs.
    """

    data: ClientData
    score: Score
    metrics: Sequence[Any]
    device: torch.device
    usual: Sequence[str] | None = None
    parts: Sequence[torch.Tensor] | None = None
    logits: bool | None = None

    def __post_init__(self) -> None:
        chosen(self.metrics)  # refuses what there is not, before anything is trained

    def __call__(self, model: nn.Module) -> Mapping[str, float]:
        total, count, metrics = 0.0, 0, chosen(self.metrics or self.usual or ())
        for number, part in enumerate(self.parts or torch.arange(len(self.data)).split(AT_ONCE)):
            found = self.score(model, placed(self.data.take(part), self.device))
            total, count = total + float(found.loss) * found.count, count + found.count
            if number == 0 and not self.metrics and self.usual is None and _are_classes(found):
                metrics = chosen(["accuracy"])
            for metric in metrics.values():
                if isinstance(metric, Collected):
                    metric.logits = self.logits
                metric.update(found.outputs, found.targets)
        return {
            "loss": total / count,
            **{name: metric.compute() for name, metric in metrics.items()},
        }


def by_outputs(
    loss: OutputLoss, for_metrics: Callable[[Any], Any] = lambda targets: targets
) -> Score:
    """A model on (inputs, targets), by `loss(outputs, targets)`; metrics are given `for_metrics(targets)`."""

    def score(model: nn.Module, batch: Batch) -> Scored:
        inputs, targets = batch
        outputs = model(inputs)
        return Scored(loss(outputs, targets), len(targets), outputs, for_metrics(targets))

    return score


def by_objective(objective: Loss, metrics: bool) -> Score:
    """A model by `objective(model, batch)`; only metrics need a batch to be (inputs, targets)."""

    def score(model: nn.Module, batch: Batch) -> Scored:
        size = len(next(iter(batch.values()))) if isinstance(batch, Mapping) else len(batch[0])
        if not metrics:
            return Scored(objective(model, batch), size)
        if isinstance(batch, Mapping) or len(batch) != 2:
            raise SpecError(
                "`metrics` with `objective` need batches of (inputs, targets); leave `metrics` out"
            )
        return Scored(objective(model, batch), size, model(batch[0]), batch[1])

    return score


def _are_classes(found: Scored) -> bool:
    outputs, targets = found.outputs, found.targets
    if (
        not (isinstance(outputs, torch.Tensor) and isinstance(targets, torch.Tensor))
        or targets.is_floating_point()
    ):
        return False
    return by_class(outputs, targets)
