"""Metrics as values: how good a model's outputs are on all examples of a test set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

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
        """Takes in one batch.

        Args:
            outputs: What the model returned for the batch.
            targets: What it should have been.
        """

    @abstractmethod
    def compute(self) -> float:
        """The metric over all batches."""
