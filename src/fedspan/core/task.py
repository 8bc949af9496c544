"""A task as a value: what to train on, before any data is in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fedspan.core.config import Settings
from fedspan.core.errors import SpecError
from fedspan.core.layout import Ints, Seeds
from fedspan.core.objective import Problem


@dataclass(frozen=True, eq=False)
class Holdings:
    """Who has how many examples."""

    counts: Ints  # (clients, classes); one column where there are no classes
    clients: Sequence[str]  # names
    classes: Sequence[str] = ()  # names; none where targets are no classes


class Task(ABC):
    """A frozen dataclass of settings that builds a `Problem`.

    `seeds` has one seed per run. `settings` are those of the run: batch size, device, projection and so on.
    """

    several_seeds: ClassVar[bool] = True  # whether `build` takes several seeds as a batch

    @abstractmethod
    def build(self, seeds: Seeds, settings: Settings) -> Problem:
        """Loads or makes the data of all clients."""

    def client_problem(
        self,
        client: int,
        seeds: Seeds,
        settings: Settings,
        agreed: Mapping[str, Any] | None = None,
    ) -> Problem:
        """The problem as one client's machine needs it: only that client's data has to be there."""
        return self.build(seeds, settings)

    def server_problem(
        self, seeds: Seeds, settings: Settings, agreed: Mapping[str, Any] | None = None
    ) -> Problem:
        """The problem as a server needs it: the model and its test set, and no client's data.

        `agreed` is what the clients have agreed on before round 0.
        """
        return self.build(seeds, settings)

    def describe(self, client: int, seeds: Seeds, settings: Settings) -> dict[str, Any]:
        """What a client says of its own data before round 0: how many examples there are for training."""
        problem = self.client_problem(client, seeds, settings)
        found: dict[str, Any] = {"examples": problem.examples(client)}
        if settings.training.per_client:
            found["batches"] = problem.batches_of(client)
        return found

    def sums(self, client: int, seed: int, asked: Mapping[str, Any]) -> list[float]:
        """What a client's table adds to the sums over clients that are asked for."""
        raise SpecError(f"the task {type(self).__name__} has no tables")

    @property
    def of_sites(self) -> Any:
        """How columns become features, if every client has a table of its own on its machine; None otherwise."""
        return None

    def holdings(self, seed: int) -> Holdings:
        """How many examples every client has, of each class where there are classes."""
        raise SpecError(f"the task {type(self).__name__} cannot say who has which examples")

    def requires(self) -> list[str]:
        """Data sets and models by name that must be on this machine, as `fedspan data` lists them."""
        return []

    def given(self) -> dict[str, Any] | None:
        """A description of data and model that were given as objects; None where the fields say it all."""
        return None

    def fingerprint(self) -> dict[str, Any]:
        """What decides the numbers in place of fields: a hash of data files, and None for fields that do not."""
        return {}
