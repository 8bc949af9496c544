"""A task as a value: what to train on, before any data is in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from fedspan.core.config import Settings
from fedspan.core.errors import SpecError
from fedspan.core.objective import Problem


class Task(ABC):
    """A frozen dataclass of settings that builds a `Problem`.

    `seeds` has one seed per run. `settings` are those of the run: batch size, device, projection and so on.
    """

    several_seeds: ClassVar[bool] = True  # whether `build` takes more than one seed and batches the runs

    @abstractmethod
    def build(self, seeds: tuple[int, ...], settings: Settings) -> Problem:
        """Loads or makes the data of all clients."""

    def client_problem(self, client: int, seeds: tuple[int, ...], settings: Settings) -> Problem:
        """The problem as one client's machine needs it: only that client's data has to be there."""
        return self.build(seeds, settings)

    def server_problem(self, seeds: tuple[int, ...], settings: Settings) -> Problem:
        """The problem as a server needs it: the model and its test set, and no client's data."""
        return self.build(seeds, settings)

    def counts(self, seed: int) -> npt.NDArray[np.int64]:
        """The number of examples of each class that each client has: (clients, classes)."""
        raise SpecError(f"{type(self).__name__} has no classes to count")

    def given(self) -> dict[str, Any] | None:
        """A description of data and model that were given as objects; None where the fields say it all."""
        return None
