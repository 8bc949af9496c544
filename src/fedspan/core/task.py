"""A task as a value: what to train on, before any data is in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch

from fedspan.core.errors import SpecError
from fedspan.core.objective import Problem

Weights = Literal["uniform", "examples"]


class Task(ABC):
    """A frozen dataclass of settings that builds a `Problem`."""

    several_seeds: ClassVar[bool] = True  # whether `build` takes more than one seed and batches the runs

    @abstractmethod
    def build(self, seeds: tuple[int, ...], dtype: torch.dtype, weights: Weights = "uniform") -> Problem:
        """Load or make the data, for one run a seed."""

    def counts(self, seed: int) -> npt.NDArray[np.int64]:
        """How many examples of each class each client holds: (clients, classes)."""
        raise SpecError(f"{type(self).__name__} has no classes to count")
