"""How a model's examples are read, what is minimized on them, and how the model is evaluated.

A Hugging Face model without a given loss is trained by its own, on tokenized text. Any other model is trained on
(inputs, targets) by `loss(outputs, targets)`, or by `objective(model, batch)` on whatever a batch is.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fedspan.core.config import Settings
from fedspan.core.errors import DataError, SpecError, shown
from fedspan.huggingface.models import (
    about,
    is_pretrained,
    own_loss,
    prepare,
    score_of,
    usual_metrics,
)
from fedspan.huggingface.text_data import as_texts, by_length
from fedspan.metrics._collected import Labels, one_number
from fedspan.metrics._own import chosen
from fedspan.nn.client_data import Batch, ClientData, Loss, as_client_data, placed, table_columns
from fedspan.nn.evaluate import Evaluator, by_objective, by_outputs
from fedspan.nn.loaders import drawing
from fedspan.nn.problem import Evaluate
from fedspan.nn.problem_kind import USUAL, OutputLoss, ProblemKind, converted, problem_kind, tried

PROBED = 2  # examples that the model is tried on


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
    model: nn.Module,
    settings: Settings,
    loss: OutputLoss | None = None,
    objective: Loss | None = None,
) -> ModelAdapter:
    """Chooses by the model: its own loss for a Hugging Face model, otherwise the given one or that of the data."""
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
    if objective is not None:
        score = by_objective(objective, bool(metrics))
        if not callable(objective):
            raise SpecError(
                f"`objective` must be a function of (model, batch), got {shown(objective)}"
            )
        columns, seen = _Columns(), set[int]()

        def tried_once(data: Any, who: str) -> ClientData:
            read = as_client_data(columns.ordered(data, who) if is_frame(data) else data, who)
            _try(model, objective, read, first=not seen)
            seen.add(0)
            return read

        return ModelAdapter(
            tried_once,
            objective,
            lambda test: Evaluator(test, score, metrics, device),
        )
    pairs = _Pairs(model, settings, loss)
    return ModelAdapter(pairs.client_data, pairs.objective, pairs.evaluator)


def _try(model: nn.Module, objective: Loss, data: ClientData, first: bool) -> None:
    """The objective must give a number with a gradient on two examples; the model stays as it was.

    On the first client it is also tried on the same examples twice: a sum over the batch doubles.
    """
    parameter = next(model.parameters())
    if parameter.is_meta:
        return
    index = torch.arange(min(PROBED, len(data)))
    batches = [
        placed(data.take(index.repeat(n)), parameter.device) for n in ((1, 2) if first else (1,))
    ]
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        found = []
        for batch in batches:
            with torch.enable_grad(), drawing(0, parameter.device):
                call = functools.partial(objective, model, batch)
                found.append(one_number(call, "`objective`", "(model, batch)", trains=True))
    finally:
        for module, mode in modes:
            module.training = mode
    if first and abs(found[0]) > 1e-6 and math.isclose(found[1], 2 * found[0], rel_tol=1e-4):
        warnings.warn(
            "`objective` doubles when a batch is doubled, so that it looks like a sum; return the mean over the batch, "
            "or steps grow with the batch and evaluations are wrong",
            stacklevel=2,
        )


class _Columns:
    """Columns of tables by name: those of the first client decide their order."""

    def __init__(self) -> None:
        self.names: list[Any] | None = None

    def ordered(self, data: Any, who: str) -> Any:
        """The data with the columns of its table, or of its table of inputs, in the order of the first client's."""
        if isinstance(data, list | tuple) and len(data) == 2 and is_frame(data[0]):
            return self.ordered(data[0], who), data[1]
        if not is_frame(data):
            data = table_columns(data) or data
        if not is_frame(data) and not isinstance(data, Mapping):
            return data
        names = list(data) if isinstance(data, Mapping) else list(data.columns)
        self.names = self.names or names
        if len(set(names)) < len(names):
            raise DataError(f"{who} has two columns of one name among {_shown(names)}; rename one")
        if set(names) != set(self.names):
            raise DataError(
                f"{who} has the columns {_shown(names)}, the first client {_shown(self.names)}; rename them"
            )
        if names == self.names:
            return data
        return (
            {name: data[name] for name in self.names}
            if isinstance(data, Mapping)
            else data[self.names]
        )


def is_frame(data: Any) -> bool:
    return hasattr(data, "columns") and hasattr(data, "iloc")


def _shown(names: list[Any]) -> str:
    return ", ".join(map(str, names[:8])) + (", …" if len(names) > 8 else "")


class _Pairs:
    """Data of (inputs, targets). The first data that is read decides the kind of problem."""

    def __init__(self, model: nn.Module, settings: Settings, loss: OutputLoss | None) -> None:
        self.model, self.settings, self.loss = model, settings, loss
        self.kind: ProblemKind | None = None
        self.columns = _Columns()
        self.shape: torch.Size | None = None  # of the inputs of an example that the model takes

    def client_data(self, data: Any, who: str) -> ClientData:
        read = as_client_data(self.columns.ordered(data, who), who)
        few = read.take(torch.arange(min(PROBED, len(read))))
        if self.kind is None:
            self.kind = problem_kind(self.model, few, self.loss, who)
            _check_metrics(self.settings, self.kind)
        inputs = self.kind.batch(few, who)[0]
        if isinstance(inputs, torch.Tensor) and inputs.shape[1:] != self.shape:
            tried(self.model, inputs, who)
            self.shape = inputs.shape[1:]
        return converted(read, self.kind, who)

    def objective(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        assert self.kind is not None
        return self.kind.loss(model(batch[0]), batch[1])

    def evaluator(self, test: ClientData) -> Evaluate:
        assert self.kind is not None
        score = by_outputs(self.kind.loss, self.kind.for_metrics)
        usual = None if self.kind.kind == "other" else USUAL.get(self.kind.kind, ())
        device = self.settings.torch_device
        return Evaluator(test, score, self.settings.metrics, device, usual, logits=self.kind.logits)


def _check_metrics(settings: Settings, kind: ProblemKind) -> None:
    """Metrics of labels make no sense of a model that is trained to predict numbers."""
    wrong = [
        name for name, metric in chosen(settings.metrics).items() if isinstance(metric, Labels)
    ]
    if wrong and kind.kind == "numbers":
        raise SpecError(
            f"`metrics` {wrong[0]!r} is for classes, and `loss` for numbers; use 'r2', 'mae' or 'mse'"
        )
