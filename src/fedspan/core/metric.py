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
    """Return whether more of a metric is better, as its `higher_is_better` says; None: nobody says."""
    if isinstance(metric, functools.partial) and not hasattr(metric, "higher_is_better"):
        return direction_of(metric.func)
    said = getattr(metric, "higher_is_better", None)
    return None if said is None else bool(said)
