"""Metrics as users give them: names, classes and objects, functions, and metrics of scikit-learn and torchmetrics."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Sequence
from typing import Any

import torch

from fedspan.core import tables
from fedspan.core.errors import SpecError, shown
from fedspan.core.metric import Metric, column_of, is_sklearn
from fedspan.metrics._collected import (
    Collected,
    are_probabilities,
    by_class,
    one_number,
    without_column,
)

Tensor = torch.Tensor
# Columns of every run, and names of a first argument that is the truth.
RESERVED = (
    "round", "up_bytes", "down_bytes", "total_bytes", "seconds", "loss", "training_loss", "events", "diverged",
)  # fmt: skip
TRUTHS = ("y_true", "true", "target", "targets", "label", "labels", "actual")
OF_PROBABILITIES = ("log_loss", "d2_log_loss_score")  # of scikit-learn, which call them y_pred


def chosen(given: Sequence[Any]) -> dict[str, Metric]:
    """Return name → a fresh metric, from all that a user may give."""
    found: dict[str, Metric] = {}
    for one in given:
        metric, name = _fresh(one), column_of(one)
        if name in RESERVED:
            raise SpecError(
                f"`metrics` {name!r} is the name of a column of every run; give it another name"
            )
        first = found.setdefault(name, metric)
        same = type(first) is type(metric) and repr(vars(first)) == repr(vars(metric))
        if first is not metric and (not same or isinstance(metric, Own)):
            raise SpecError(
                f"`metrics` {name!r} is there twice; give one of them another `__name__`"
            )
    return found


def _fresh(given: Any) -> Metric:
    if isinstance(given, str):
        named: Metric = tables.build("metric", given, "metrics")
        return named
    if isinstance(given, type) and issubclass(given, (Metric, _torchmetrics())):
        try:
            given = given()
        except (TypeError, ValueError) as error:
            raise SpecError(
                f"`metrics` {given.__name__} cannot be made without settings ({error}); write {given.__name__}(…)"
            ) from None
    if isinstance(given, Metric):
        return copy.deepcopy(given)
    if callable(given):  # those of torchmetrics are
        return Own(given)
    raise SpecError(
        f"`metrics` must be names, metrics or functions of (outputs, targets), got {shown(given)}"
    )


def _torchmetrics() -> Any:
    """Return the base class of torchmetrics, if anybody has imported it."""
    return getattr(sys.modules.get("torchmetrics"), "Metric", ())


class Own(Collected):
    """A function or a metric of torchmetrics, of all examples at once.

    A function is one of (outputs, targets), or of (targets, outputs) if its first argument is named `y_true` or so.
    Functions of `sklearn.metrics` get what the names of their arguments promise: predicted labels, scores or
    probabilities. Metrics of torchmetrics get probabilities and whole labels where a logit is trained to tell yes from
    no, and columns of one number as flat tensors.
    """

    def __init__(self, given: Any) -> None:
        super().__init__()
        self.given = given

    def summary(self) -> None:
        """Return nothing: a function of one's own may be any."""

    def value(self, outputs: Tensor, targets: Tensor) -> float:
        """Return what it computes."""
        given: Any = self.given
        arguments = "(outputs, targets)"
        names = _arguments(given)
        if isinstance(given, _torchmetrics()):
            given, arguments = copy.deepcopy(given), "(preds, target)"
            given.reset()
            if outputs.numel() == targets.numel() and outputs[0].numel() == 1:
                outputs, targets = outputs.flatten(), targets.flatten()
            if self.logits is not None:
                outputs = outputs.sigmoid() if self.logits else outputs
                targets = (targets > 0.5).long()
        elif names and names[0] in TRUTHS:
            inner = getattr(given, "func", given)
            if is_sklearn(inner) and len(names) > 1:
                wanted = "probabilities" if inner.__name__ in OF_PROBABILITIES else names[1]
                outputs, targets = _for_sklearn(outputs, targets, wanted, self.logits)
            outputs, targets, arguments = targets, outputs, f"({', '.join(names[:2])})"
        what = f"`metrics` {column_of(given)}"
        return one_number(lambda: given(outputs, targets), what, arguments)


def _arguments(function: Any) -> list[str]:
    """Return the names of a function's arguments that are given by place; none where Python cannot tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [one.name for one in parameters if one.kind <= one.POSITIONAL_OR_KEYWORD]


def _for_sklearn(
    outputs: Tensor, targets: Tensor, wanted: str, logits: bool | None
) -> tuple[Tensor, Tensor]:
    """Return outputs as the argument `wanted` of a function of scikit-learn is meant, and flat targets."""
    targets = without_column(targets)
    if by_class(outputs, targets):
        if wanted == "y_pred":
            return outputs.argmax(1), targets
        if outputs.shape[1] > 2 or wanted.startswith("prob"):
            return outputs if wanted == "pred_decision" else _probabilities(outputs), targets
        # of two classes the second is the one that is scored
        if wanted.startswith("y_prob"):
            return _probabilities(outputs)[:, 1], targets
        return outputs[:, 1].double() - outputs[:, 0], targets
    outputs = outputs.reshape(targets.shape)
    if logits is None:  # of numbers
        return outputs, targets
    if wanted == "y_pred":
        return (outputs > (0.0 if logits else 0.5)).long(), (targets > 0.5).long()
    squashed = logits and "prob" in wanted
    return outputs.double().sigmoid() if squashed else outputs, (targets > 0.5).long()


def _probabilities(outputs: Tensor) -> Tensor:
    """Return class probabilities, from those or from logits."""
    outputs = outputs.double()
    if are_probabilities(outputs):
        return outputs / outputs.sum(1, keepdim=True)
    return outputs.softmax(1)
