"""What tasks that train a torch module share: who holds which examples, and how a problem is made of them.

A task names its material: the model, and functions that read the clients' examples and the test set. In one process
all of it is read, or, with very many clients, each client's when it first takes part. A client's own machine reads that
client's examples alone, and a server the test set.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.data import DataLoader

from fedspan.core.config import Settings
from fedspan.core.errors import SpecError
from fedspan.core.task import Holdings, Task
from fedspan.nn.client_data import (
    KEPT,
    ClientData,
    LocalClients,
    Loss,
    ReadLater,
    client_name,
    split_parts,
)
from fedspan.nn.evaluate import Evaluator
from fedspan.nn.problem import ClientTests, Evaluate, TorchProblem
from fedspan.nn.problem_kind import OutputLoss
from fedspan.nn.projection_rules import projection_rules
from fedspan.tasks._model_adapter import ModelAdapter, model_adapter

READ_AT_START = (
    10_000  # clients; the data of more is read and checked when a client first takes part
)


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
    names: Sequence[str] | None = None  # of the clients; None: they are numbered
    sizes: Callable[[], Sequence[int] | None] = lambda: (
        None
    )  # numbers of examples, where they are known unread

    def who(self, client: int) -> str:
        """A client as error messages name it."""
        return client_name(client, self.names)


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

    def client_problem(
        self, client: int, seeds: tuple[int, ...], settings: Settings
    ) -> TorchProblem:
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

    def holdings(self, seed: int) -> Holdings:
        """How many examples every client has; of each class where targets are whole numbers."""
        made = self.material(seed, torch.float32)
        given = list(made.examples(range(made.clients)))
        names = made.names or [str(number) for number in range(made.clients)]
        targets = [_classes_of(data) for data in given]
        if any(one is None for one in targets):
            adapter = model_adapter(made.model, Settings(), made.loss, made.objective)
            sizes = [
                len(adapter.client_data(data, made.who(number)))
                for number, data in enumerate(given)
            ]
            return Holdings(np.array(sizes)[:, None], names)
        number = 1 + max(int(one.max()) for one in targets if one is not None)
        counts = np.stack(
            [np.bincount(one, minlength=number) for one in targets if one is not None]
        )
        return Holdings(counts, names, [str(one) for one in range(number)])

    def _problem(
        self,
        made: Material,
        ids: Sequence[int],
        seed: int,
        settings: Settings,
        on_client: bool = False,
    ) -> TorchProblem:
        chosen = settings.projection
        frozen = self.frozen_modules if chosen.frozen_modules is None else chosen.frozen_modules
        rules = projection_rules(
            made.model, chosen.project_modules, chosen.full_modules, frozen, chosen.min_numel
        )
        adapter = model_adapter(made.model, settings, made.loss, made.objective)
        clients, tests = _population(made, ids, adapter)
        test, validation = (None, None) if on_client else (made.test(), made.validation())
        tests_on = adapter.evaluator(test)
        problem = TorchProblem(
            made.model,
            clients,
            adapter.objective,
            rules,
            settings,
            seed=seed,
            evaluate=_scores(tests_on, adapter.evaluator(validation, "validation set")),
            on_client=on_client,
            names=made.names,
            client_tests=None if on_client else ClientTests(tests, adapter.on),
        )
        problem.test_examples = len(tests_on.data) if isinstance(tests_on, Evaluator) else None
        return problem


def _population(
    made: Material, ids: Sequence[int], adapter: ModelAdapter
) -> tuple[Sequence[ClientData], Mapping[int, tuple[str, ClientData]]]:
    """The clients' training data, and what they are evaluated on; the data of a large population is read later."""

    def read(i: int, data: Any) -> tuple[ClientData, str, ClientData]:
        train, part, held_out = split_parts(data, made.who(i))
        own = adapter.client_data(train, made.who(i))
        return (
            own,
            part,
            own if held_out is None else adapter.client_data(held_out, f"{made.who(i)}, {part}"),
        )

    if len(ids) <= READ_AT_START:
        found = {
            i: read(i, data) for i, data in zip(ids, made.examples(ids) if ids else (), strict=True)
        }
        own = {i: one[0] for i, one in found.items()}
        clients = (
            list(own.values()) if len(own) == made.clients else LocalClients(own, made.clients)
        )
        return clients, {i: one[1:] for i, one in found.items()}
    each = functools.lru_cache(maxsize=KEPT)(lambda i: read(i, next(iter(made.examples([i])))))
    each(0)  # the first client decides the kind of problem
    return ReadLater(made.clients, lambda i: each(i)[0], made.sizes()), TestsLater(
        made.clients, each
    )


class TestsLater(Mapping[int, tuple[str, ClientData]]):
    """What each client of a large population is evaluated on."""

    def __init__(
        self, clients: int, read: Callable[[int], tuple[ClientData, str, ClientData]]
    ) -> None:
        self.clients, self.read = clients, read

    def __len__(self) -> int:
        return self.clients

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.clients))

    def __getitem__(self, client: int) -> tuple[str, ClientData]:
        return self.read(client)[1:]


def _scores(test: Evaluate | None, validation: Evaluate | None) -> Evaluate | None:
    """Metrics of the test set, and those of the validation set under names of their own."""
    if validation is None:
        return test
    return lambda model: {
        **(test(model) if test is not None else {}),
        **{f"validation_{name}": value for name, value in validation(model).items()},
    }


def _classes_of(data: Any) -> npt.NDArray[np.int64] | None:
    """The targets of a client's data where they are classes: whole numbers from 0, one per example."""
    if isinstance(data, DataLoader):
        data = data.dataset
    parts = getattr(data, "tensors", data)
    if isinstance(parts, Mapping):
        parts = (None, parts.get("labels"))
    if (
        not isinstance(parts, list | tuple)
        or len(parts) != 2
        or not isinstance(parts[1], torch.Tensor | np.ndarray)
    ):
        return None
    targets = np.asarray(parts[1])
    return (
        targets.astype(np.int64)
        if targets.dtype.kind in "biu" and targets.ndim == 1 and targets.min() >= 0
        else None
    )
