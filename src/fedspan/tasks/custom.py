"""A model and data of your own: a Python module with `model()` and `data(client)`.

It may also have `test()`, the data that the server scores on, and `loss(outputs, targets)`. A Hugging Face model is
trained by its own loss, on tokenized text. Across machines a client's calls `model` and `data` alone, the server's
`model` and `test`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fedspan.core.errors import SpecError, at_least
from fedspan.core.registry import register
from fedspan.core.task import Weights
from fedspan.nn.problem import TorchProblem
from fedspan.tasks._module import Material, ModuleTask


@register
@dataclass(frozen=True, kw_only=True)
class Custom(ModuleTask):
    """Whatever a module of the user's offers."""

    module: str  # its import name, or the path of its file
    clients: int

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("clients", self.clients, 1)

    def material(self, seed: int, dtype: torch.dtype) -> Material:
        """What the module's functions give; none is called for data that is not needed here."""
        module = self._module()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: torch.nn.Module = self._call(module, "model")
        if not any(p.dtype == torch.bfloat16 for p in model.parameters()):  # its x has the run's type all the same
            model = model.to(dtype)
        return Material(
            model,
            self.clients,
            lambda ids: [self._call(module, "data", client) for client in ids],
            getattr(module, "test", lambda: None),
            getattr(module, "loss", None),
        )

    def server_problem(self, seeds: tuple[int, ...], dtype: torch.dtype, weights: Weights = "uniform") -> TorchProblem:
        """No data but what the server scores on."""
        if weights != "uniform":
            raise SpecError(
                "`participation.weights` 'examples' needs all clients' data; a server has none: use 'uniform'"
            )
        return super().server_problem(seeds, dtype)

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
