"""What tasks that train a torch module share: how its tensors are trained, and who holds which examples.

A task names its material: the model, and functions that read the clients' examples and the test set. In one process all
of it is read; a client's own machine reads that client's examples alone, and a server the test set.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from fedspan.core.config import Augment, Engine, Participation, Settings, Training
from fedspan.core.errors import SpecError, at_least
from fedspan.core.task import Task, Weights
from fedspan.nn.client_data import LocalClients
from fedspan.nn.problem import TorchProblem
from fedspan.nn.projection_rules import MIN_NUMEL, projection_rules
from fedspan.tasks._model_adapter import OutputLoss, model_adapter


@dataclass(frozen=True, eq=False)
class Material:
    """What a problem is made of; examples are read when they are asked for."""

    model: nn.Module
    clients: int
    examples: Callable[[Sequence[int]], Iterable[Any]]  # of these clients, in their order
    test: Callable[[], Any]  # None: there is nothing to score on
    loss: OutputLoss | None = None
    augment: Augment | None = None


@dataclass(frozen=True, kw_only=True)
class ModuleTask(Task):
    """What every task with a torch module is told."""

    several_seeds: ClassVar[bool] = False

    batch: int = 32
    weight_decay: float = 0.0
    clip: float | None = None  # longest gradient
    freeze: tuple[str, ...] = ()  # tensors that are neither trained nor sent, by name patterns
    whole: tuple[str, ...] = ()  # tensors to train and send whole, by name patterns
    project: tuple[str, ...] = ()  # tensors to project although they would go whole
    least: int = MIN_NUMEL  # tensors of fewer numbers go whole
    recompute: bool = False  # outputs of covered layers are made again in the backward pass, see `nn.recompute`
    device: str = "cpu"  # auto: cuda where there is one

    def __post_init__(self) -> None:
        at_least("batch", self.batch, 1)
        at_least("least", self.least, 1)
        Training(weight_decay=self.weight_decay, clip=self.clip)

    @abstractmethod
    def material(self, seed: int, dtype: torch.dtype) -> Material:
        """The model, and how to read the examples."""

    def build(self, seeds: tuple[int, ...], dtype: torch.dtype, weights: Weights = "uniform") -> TorchProblem:
        """All clients' examples and the test set in one process."""
        (seed,) = seeds
        made = self.material(seed, dtype)
        return self._problem(made, range(made.clients), seed, weights)

    def client_problem(self, client: int, seeds: tuple[int, ...], dtype: torch.dtype) -> TorchProblem:
        """One client's examples and no test set."""
        (seed,) = seeds
        made = self.material(seed, dtype)
        if not 0 <= client < made.clients:
            raise SpecError(
                f"client {client} is not one of the {made.clients} that the task has, 0 to {made.clients - 1}"
            )
        return self._problem(made, [client], seed, on_client=True)

    def server_problem(self, seeds: tuple[int, ...], dtype: torch.dtype, weights: Weights = "uniform") -> TorchProblem:
        """The test set, and no client's examples unless they are what clients are weighted by."""
        (seed,) = seeds
        if weights == "examples":
            return self.build(seeds, dtype, weights)
        return self._problem(self.material(seed, dtype), [], seed)

    def _problem(
        self, made: Material, ids: Sequence[int], seed: int, weights: Weights = "uniform", on_client: bool = False
    ) -> TorchProblem:
        settings = Settings(
            batch_size=self.batch,
            device=self.device,
            training=Training(weight_decay=self.weight_decay, clip=self.clip, augment=made.augment),
            participation=Participation(weights=weights),
            engine=Engine(recompute=self.recompute),
        )
        rules = projection_rules(made.model, self.project, self.whole, self.freeze, self.least)
        adapter = model_adapter(made.model, settings, made.loss)
        given = made.examples(ids) if ids else ()
        own = {i: adapter.client_data(data, f"client {i}") for i, data in zip(ids, given, strict=True)}
        return TorchProblem(
            made.model,
            list(own.values()) if len(own) == made.clients else LocalClients(own, made.clients),
            adapter.objective,
            rules,
            settings,
            seed=seed,
            evaluate=None if on_client else adapter.evaluator(made.test()),
            on_client=on_client,
        )
