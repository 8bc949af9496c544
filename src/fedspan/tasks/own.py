"""A model and data of your own: a Python module with `model()` and `data(client)`.

It may also have `test()`, the data that the server scores on, and `loss(outputs, targets)`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812

from fedspan.core.errors import DataError, SpecError, at_least
from fedspan.core.registry import register
from fedspan.core.task import Task, Weights
from fedspan.nn.cover import LEAST, choose
from fedspan.nn.problem import TorchProblem
from fedspan.nn.score import scorer
from fedspan.nn.source import Source, as_source


@register
@dataclass(frozen=True, kw_only=True)
class Own(Task):
    """Whatever a module of the user's offers."""

    several_seeds: ClassVar[bool] = False

    module: str  # its import name, or the path of its file
    clients: int
    batch: int = 32
    weight_decay: float = 0.0
    clip: float | None = None
    whole: tuple[str, ...] = ()
    project: tuple[str, ...] = ()
    least: int = LEAST
    device: str = "cpu"

    def __post_init__(self) -> None:
        at_least("clients", self.clients, 1)
        at_least("batch", self.batch, 1)

    def build(self, seeds: tuple[int, ...], dtype: torch.dtype, weights: Weights = "uniform") -> TorchProblem:
        """All clients' data in one process."""
        return self._problem(seeds, dtype, [self._data(i) for i in range(self.clients)], weights)

    def site(self, client: int, seeds: tuple[int, ...], dtype: torch.dtype) -> TorchProblem:
        """One client's data alone."""
        if not 0 <= client < self.clients:
            raise SpecError(f"client {client} is not one of the {self.clients} that `task.clients` names")
        return self._problem(seeds, dtype, _Only(self._data(client), client, self.clients), "uniform")

    def centre(self, seeds: tuple[int, ...], dtype: torch.dtype, weights: Weights = "uniform") -> TorchProblem:
        """No data but what the server scores on."""
        if weights != "uniform":
            raise SpecError(
                "`participation.weights` 'examples' needs all clients' data; a server has none: use 'uniform'"
            )
        return self._problem(seeds, dtype, _Only(None, -1, self.clients), "uniform")

    def _problem(
        self, seeds: tuple[int, ...], dtype: torch.dtype, sources: Sequence[Source], weights: Weights
    ) -> TorchProblem:
        (seed,) = seeds
        module = self._module()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: torch.nn.Module = self._call(module, "model").to(dtype)
        loss: Callable[..., torch.Tensor] = getattr(module, "loss", F.cross_entropy)
        test = self._call(module, "test") if hasattr(module, "test") else None
        device = torch.device(self.device)
        return TorchProblem(
            model,
            sources,
            lambda m, b: loss(m(b[0]), b[1]),
            choose(model, self.whole, self.project, self.least),
            seed=seed,
            batch=self.batch,
            evaluate=None if test is None else scorer(as_source(test, "test set"), loss, None, device),
            by_examples=weights == "examples",
            weight_decay=self.weight_decay,
            clip=self.clip,
            device=self.device,
        )

    def _data(self, client: int) -> Source:
        return as_source(self._call(self._module(), "data", client), f"client {client}")

    def _module(self) -> ModuleType:
        if self.module.endswith(".py"):
            return _from_file(Path(self.module))
        try:
            return importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            raise SpecError(f"`task.module` {self.module!r} cannot be imported: {error}") from None

    def _call(self, module: ModuleType, name: str, *arguments: Any) -> Any:
        if not callable(getattr(module, name, None)):
            raise SpecError(
                f"`task.module` {self.module!r} has no function {name}(); it needs model() and data(client)"
            )
        return getattr(module, name)(*arguments)


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise SpecError(f"`task.module` {str(path)!r} does not exist")
    name = f"fedspan_own_{path.stem}"
    if name not in sys.modules or getattr(sys.modules[name], "__file__", None) != str(path):
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


class _Only(Sequence[Source]):
    """The sources of N clients of whom one is here, or none."""

    def __init__(self, source: Source | None, client: int, clients: int) -> None:
        self.source, self.client, self.clients = source, client, clients

    def __len__(self) -> int:
        return self.clients

    def __getitem__(self, client: Any) -> Any:
        if client != self.client or self.source is None:
            raise DataError(f"the data of client {client} is not on this machine")
        return self.source

    def here(self) -> list[Source]:
        """Those that are here."""
        return [] if self.source is None else [self.source]
