"""Metrics as values: how good a model's outputs are on all examples of a test set."""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

IGNORED = -100  # torch's and transformers' mark of a target that does not count


class Metric(ABC):
    """One number per evaluation. Every evaluation uses a fresh object.

    Outputs and targets follow the convention of torch's losses: class scores are (n, classes, …) and their targets
    (n, …); one score per target has the shape of the targets. A target of -100 does not count.
    """

    higher_is_better: ClassVar[bool] = True

    @abstractmethod
    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Take in one batch.

        Args:
            outputs: What the model returned for the batch.
            targets: What it should have been.
        """

    @abstractmethod
    def compute(self) -> float:
        """Return the metric over all batches."""


def column_of(metric: Any) -> str:
    """Return the name of a metric's column: a name, a function's name, or the name of a class.

    The class of a `Metric` is written in snake case, as in `Top2Accuracy` → top2_accuracy.
    """
    if isinstance(metric, str):
        return metric
    if isinstance(metric, functools.partial) and not hasattr(metric, "__name__"):
        return column_of(metric.func)
    cls = metric if isinstance(metric, type) else type(metric)
    if issubclass(cls, Metric):
        return snake_case(cls.__name__)
    name = str(getattr(metric, "__name__", type(metric).__name__))
    return "metric" if name == "<lambda>" else name


def snake_case(name: str) -> str:
    """Return the name of a class as a file would have it: EarlyStopping → early_stopping, AUROC → auroc."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def direction_of(metric: Any) -> bool | None:
    """Return whether more of a metric is better, as `higher_is_better` of a class, an object or a function says.

    Functions of scikit-learn have it in their names. None: nobody says.
    """
    said = getattr(metric, "higher_is_better", None)
    if said is None and isinstance(metric, functools.partial):
        return direction_of(metric.func)
    if said is None and is_sklearn(metric):
        name = str(metric.__name__)
        lower = name.endswith(("_error", "_loss", "_deviance"))
        return False if lower else True if name.endswith("_score") else None
    return None if said is None else bool(said)


def is_sklearn(function: Any) -> bool:
    """Return whether a function is one of `sklearn.metrics`."""
    return str(getattr(function, "__module__", "")).startswith("sklearn.metrics.") and hasattr(
        function, "__name__"
    )
