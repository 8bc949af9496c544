"""What tasks that train a torch module share: who holds which examples, and how a problem is made of them.

A task names its material: the model, and functions that read the clients' examples and the test set. In one process
all of it is read. A client's own machine reads that client's examples alone, and a server the test set.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from fedspan.core.config import Augment, Settings
from fedspan.core.errors import DataError, SpecError, one_of
from fedspan.core.task import Task
from fedspan.nn.augment import AUGMENT
from fedspan.nn.client_data import ClientData, Loss
from fedspan.nn.problem import Evaluate, TorchProblem
from fedspan.nn.projection_rules import choose, freeze
from fedspan.tasks._model_adapter import OutputLoss, model_adapter


@dataclass(frozen=True, eq=False)
class Material:
    """What a problem is made of; examples are read when they are asked for."""

    model: nn.Module
    clients: int
    examples: Callable[[Sequence[int]], Iterable[Any]]  # of these clients, in their order
    test: Callable[[], Any]  # None: there is no test set
    loss: OutputLoss | None = None
    objective: Loss | None = None  # in place of a loss of outputs and targets
    validation: Callable[[], Any] = lambda: None


class ModuleTask(Task):
    """A task with a torch module."""

    several_seeds: ClassVar[bool] = False
    frozen_modules: ClassVar[tuple[str, ...]] = ()  # frozen where a run's projection does not say

    @abstractmethod
    def material(self, seed: int, dtype: torch.dtype) -> Material:
        """The model, and how to read the examples."""

    def build(self, seeds: tuple[int, ...], settings: Settings) -> TorchProblem:
        """All clients' examples and the test set in one process."""
        (seed,) = seeds
        made = self.material(seed, settings.torch_dtype)
        return self._problem(made, range(made.clients), seed, settings)

    def client_problem(self, client: int, seeds: tuple[int, ...], settings: Settings) -> TorchProblem:
        """One client's examples and no test set."""
        (seed,) = seeds
        made = self.material(seed, settings.torch_dtype)
        if not 0 <= client < made.clients:
            raise SpecError(
                f"client {client} is not one of the {made.clients} that the task has, 0 to {made.clients - 1}"
            )
        return self._problem(made, [client], seed, settings, on_client=True)

    def server_problem(self, seeds: tuple[int, ...], settings: Settings) -> TorchProblem:
        """The test set; clients' examples only where clients are weighted by their number."""
        (seed,) = seeds
        if settings.participation.weights == "examples":
            return self.build(seeds, settings)
        return self._problem(self.material(seed, settings.torch_dtype), [], seed, settings)

    def _problem(
        self, made: Material, ids: Sequence[int], seed: int, settings: Settings, on_client: bool = False
    ) -> TorchProblem:
        projection, device = settings.projection, settings.torch_device
        frozen = projection.frozen_modules
        freeze(made.model, self.frozen_modules if frozen is None else frozen)
        adapter = model_adapter(made.model, device, made.loss, made.objective)
        given = made.examples(ids) if ids else ()
        own = {i: adapter.source(data, f"client {i}") for i, data in zip(ids, given, strict=True)}
        return TorchProblem(
            made.model,
            list(own.values()) if len(own) == made.clients else Here(own, made.clients),
            adapter.objective,
            choose(made.model, projection.full_modules, projection.project_modules, projection.min_numel),
            seed=seed,
            batch=settings.examples_per_batch,
            evaluate=None if on_client else _scores(adapter.score(made.test()), adapter.score(made.validation())),
            by_examples=settings.participation.weights == "examples",
            weight_decay=settings.training.weight_decay,
            clip=settings.training.clip,
            augment=_augment(settings.training.augment),
            device=str(device),
            recompute=settings.engine.recompute,
            on_client=on_client,
        )


def _scores(test: Evaluate | None, validation: Evaluate | None) -> Evaluate | None:
    """Metrics of the test set, and those of the validation set under names of their own."""
    if validation is None:
        return test
    return lambda model: {
        **(test(model) if test is not None else {}),
        **{f"validation_{name}": value for name, value in validation(model).items()},
    }


def _augment(given: str | Augment | None) -> Augment | None:
    if not isinstance(given, str):
        return given
    one_of("training.augment", given, AUGMENT)
    return AUGMENT[given]


class Here(Sequence[ClientData]):
    """The data of N clients, of whom only some are on this machine."""

    def __init__(self, sources: dict[int, ClientData], clients: int) -> None:
        self.sources, self.clients = sources, clients

    def __len__(self) -> int:
        return self.clients

    def __getitem__(self, client: Any) -> Any:
        if client not in self.sources:
            raise DataError(f"the data of client {client} is not on this machine")
        return self.sources[client]

    def here(self) -> list[ClientData]:
        """Those that are."""
        return list(self.sources.values())
