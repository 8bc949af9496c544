"""Evaluating a model on a test set: its loss, and the metrics that are asked for or usual for the kind of problem."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fedspan.core.errors import SpecError
from fedspan.metrics._collected import Collected, by_class
from fedspan.metrics._own import chosen
from fedspan.nn.batches import Batch, ClientData, Loss, placed
from fedspan.nn.problem_kind import OutputLoss, call_of

AT_ONCE = 512  # examples evaluated at a time


Scored = tuple[Tensor, int, Any, Any]
"""A model on one batch: its loss, a mean over so many examples or tokens, its outputs and the targets."""

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
    parts: Sequence[Tensor] | None = None
    logits: bool | None = None

    @torch.inference_mode()
    def __call__(
        self, model: nn.Module, summaries: dict[str, list[float]] | None = None
    ) -> Mapping[str, float]:
        """Return the loss and the metrics by name.

        Args:
            model: The model, with its weights.
            summaries: Gets, by name, the numbers whose sums over several test sets give the loss and the metrics of all
                of their examples (`Collected.summary`).
        """
        total, count, metrics = 0.0, 0, chosen(self.metrics or self.usual or ())
        for number, part in enumerate(self.parts or torch.arange(len(self.data)).split(AT_ONCE)):
            batch = placed(self.data.take(part), self.device)
            loss, size, outputs, targets = self.score(model, batch)
            total, count = total + float(loss) * size, count + size
            tensors = isinstance(outputs, Tensor) and isinstance(targets, Tensor)
            guesses = number == 0 and not self.metrics and self.usual is None and tensors
            if guesses and not targets.is_floating_point() and by_class(outputs, targets):
                metrics = chosen(["accuracy"])
            for metric in metrics.values():
                if isinstance(metric, Collected):
                    metric.logits = self.logits
                metric.update(outputs, targets)
        if summaries is not None:
            summaries["loss"] = [total, float(count)]
            for name, metric in metrics.items():
                if isinstance(metric, Collected) and (own := metric.summary()) is not None:
                    summaries[name] = own.tolist()
        found = {name: metric.compute() for name, metric in metrics.items()}
        return {"loss": total / count, **found}


def by_outputs(loss: OutputLoss, for_metrics: Callable[[Any], Any]) -> Score:
    """A model on (inputs, targets), by `loss(outputs, targets)`; metrics are given `for_metrics(targets)`."""

    def score(model: nn.Module, batch: Batch) -> Scored:
        inputs, targets, *_ = batch
        outputs = call_of(model, inputs)()
        return loss(outputs, targets), len(targets), outputs, for_metrics(targets)

    return score


def by_objective(objective: Loss, metrics: bool) -> Score:
    """A model by `objective(model, batch)`; only metrics need a batch to be (inputs, targets)."""

    def score(model: nn.Module, batch: Batch) -> Scored:
        outputs = targets = None
        if metrics:  # only they need a batch to be (inputs, targets)
            if isinstance(batch, Mapping) or len(batch) != 2:
                raise SpecError(
                    "`metrics` with `objective` need batches of (inputs, targets); leave `metrics` out"
                )
            inputs, targets = batch
            outputs = call_of(model, inputs)()
        return objective(model, batch), len(tree_leaves(batch)[0]), outputs, targets

    return score
