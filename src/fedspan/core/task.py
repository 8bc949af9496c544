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

    def client_problem(self, client: int, seeds: tuple[int, ...], dtype: torch.dtype) -> Problem:
        """The problem as one client's machine needs it: only that client's data has to be there."""
        return self.build(seeds, dtype)

    def server_problem(self, seeds: tuple[int, ...], dtype: torch.dtype, weights: Weights = "uniform") -> Problem:
        """The problem as a server needs it: the model and its score, and no client's data."""
        return self.build(seeds, dtype, weights)

    def counts(self, seed: int) -> npt.NDArray[np.int64]:
        """How many examples of each class each client holds: (clients, classes)."""
        raise SpecError(f"{type(self).__name__} has no classes to count")
