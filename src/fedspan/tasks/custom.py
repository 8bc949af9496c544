"""A model and data of your own: objects given to `fedspan.fit`, or a Python module with `model()` and `data(client)`.

A module may also have `test()` and `validation()`, the data that the server evaluates on, and `loss(outputs, targets)`.
With more than 10,000 clients `data` is called when a client takes part; `sizes()`, the numbers of examples that weights
and epochs need, then spares a call for every client.
A Hugging Face model is trained by its own loss, on tokenized text. Across machines a client calls `model` and `data`
alone, the server `model`, `test` and `validation`.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fedspan.core.config import Settings
from fedspan.core.digest import module_text, source_of
from fedspan.core.errors import DataError, SpecError, at_least, one_line
from fedspan.core.registry import register
from fedspan.core.seeds import torch_generator
from fedspan.nn.client_data import Loss, client_name, table_columns
from fedspan.nn.problem import TorchProblem
from fedspan.nn.problem_kind import OutputLoss
from fedspan.tasks._imports import called, checked_model, load_module
from fedspan.tasks._module import READ_AT_START, Material, ModuleTask

SAMPLED = 64  # numbers of an array that are looked at to tell it from another


@dataclass(frozen=True, eq=False)
class Objects:
    """A model and data as Python objects."""

    model: nn.Module
    clients: Sequence[Any]  # each one's data
    test: Any = None
    validation: Any = None
    loss: OutputLoss | None = None
    objective: Loss | None = None
    names: Sequence[str] | None = None  # of the clients; None: they are numbered

    @staticmethod
    def of(model: nn.Module, clients: Sequence[Any] | Mapping[str, Any], **others: Any) -> Objects:
        """Checks what a user gives; clients of a list are numbered."""
        checked_model(model, "`model` must be")
        if not isinstance(clients, Mapping) and table_columns(clients) is not None:
            raise DataError(
                "`clients` is one table; give a list with a table per client, such as "
                "[part for _, part in table.groupby('client')]"
            )
        single = isinstance(
            clients, torch.Tensor | np.ndarray | str | bytes | set | DataLoader | Dataset
        )
        if single or not hasattr(clients, "__len__"):
            raise DataError(
                f"`clients` must be a list or a dictionary of clients' data, got {type(clients).__name__}"
            )
        if (
            isinstance(clients, Mapping)
            and "train" in clients
            and set(clients) <= {"train", "test", "validation"}
        ):
            raise DataError(
                "`clients` has the parts of one data set; divide train among clients, and give `test`"
            )
        if not len(clients):
            raise DataError("`clients` is empty; give the data of at least one client")
        names = tuple(map(str, clients)) if isinstance(clients, Mapping) else None
        data: Any = clients.values() if isinstance(clients, Mapping) else clients
        if (
            isinstance(data, list | tuple)
            or len(data) <= READ_AT_START
            or not hasattr(data, "__getitem__")
        ):
            data = list(data)  # else each client's data is fetched when it takes part
        return Objects(model, data, names=names, **others)

    def who(self, client: int) -> str:
        """A client as error messages name it."""
        return client_name(client, self.names)

    @property
    def at_hand(self) -> Sequence[Any]:
        """The data that can be looked at before the run: all of it, or the first client's of a large population."""
        return self.clients if isinstance(self.clients, list) else [self.clients[0]]

    def material(self) -> Material:
        """The same for a problem."""
        return Material(
            self._copied_model(), len(self.clients), lambda ids: [self.clients[i] for i in ids],
            lambda: self.test, self.loss, self.objective, lambda: self.validation, self.names, self._sizes,
        )  # fmt: skip

    def _copied_model(self) -> nn.Module:
        try:
            return copy.deepcopy(self.model)
        except Exception as error:
            raise SpecError(
                f"`model` cannot be copied, and every run trains a copy: {one_line(error)}; remove the attribute, or "
                "define __deepcopy__"
            ) from error

    def _sizes(self) -> list[int] | None:
        """Examples of each client where all are pairs of tensors in a list, or a sequence's own `sizes`."""
        if not isinstance(self.clients, list):
            return getattr(self.clients, "sizes", None)
        pairs = all(
            type(one) is tuple and all(type(part) is torch.Tensor for part in one)
            for one in self.clients
        )
        return [len(one[0]) for one in self.clients] if pairs else None

    def describe(self) -> dict[str, Any]:
        """Sizes and sampled hashes, by which a changed model, loss or data set is noticed."""
        return dict(self._description)

    @functools.cached_property
    def _description(self) -> dict[str, Any]:
        trained = {name for name, value in self.model.named_parameters() if value.requires_grad}
        state = self.model.state_dict()
        shapes = [(name, tuple(value.shape)) for name, value in state.items()]
        frozen = [_digest(value) for name, value in state.items() if name not in trained]
        about = repr((shapes, module_text(self.model), frozen))
        table: dict[str, Any] = {
            "name": "custom",
            "model": _hash(about.encode()),
            "data": _digest(self.clients),
        }
        table |= {"clients": len(self.clients)}
        parts = {"test": self.test, "validation": self.validation}
        table |= {name: _digest(one) for name, one in parts.items() if one is not None}
        functions = {"loss": self.loss, "objective": self.objective}
        return table | {name: source_of(one) for name, one in functions.items() if one is not None}


@register
@dataclass(frozen=True, kw_only=True)
class Custom(ModuleTask):
    """Your own model and data."""

    module: str | None = None  # import name or path of a Python file with model() and data(client)
    clients: int | None = None  # number of clients of the module
    module_dir: str | None = (
        None  # where the module is looked for; by default the directory of the spec file
    )
    objects: Objects | None = field(
        default=None, init=True, repr=False, compare=False
    )  # set by `fedspan.fit`

    def __post_init__(self) -> None:
        if self.objects is None:
            if self.module is None:
                raise SpecError(
                    "`task.module` is missing: a Python file with model() and data(client)"
                )
            at_least("task.clients", self.clients or 0, 1)

    def given(self) -> dict[str, Any] | None:
        """What is known of the objects."""
        return None if self.objects is None else self.objects.describe()

    def fingerprint(self) -> dict[str, Any]:
        """Where the module is does not decide the numbers."""
        return {"module_dir": None}

    def material(self, seed: int, dtype: torch.dtype) -> Material:
        """The objects, or what the module's functions give; none is called for data that is not needed here."""
        if self.objects is not None:
            return self.objects.material()
        assert self.clients is not None
        module = self._module()
        with torch_generator(seed):
            model = checked_model(
                self._call(module, "model"), f"`task.module` {self.module!r}: model() must return"
            )
        if not any(
            p.dtype == torch.bfloat16 for p in model.parameters()
        ):  # its x has the run's type all the same
            model = model.to(dtype)

        def given(name: str) -> Callable[[], Any]:
            return lambda: self._call(module, name) if hasattr(module, name) else None

        return Material(
            model,
            self.clients,
            lambda ids: [self._call(module, "data", client) for client in ids],
            given("test"),
            getattr(module, "loss", None),
            validation=given("validation"),
            sizes=given("sizes"),
        )

    def server_problem(self, seeds: tuple[int, ...], settings: Settings) -> TorchProblem:
        """No data but what the server evaluates on."""
        if settings.participation.weights != "uniform":
            raise SpecError(
                "`participation.weights` 'examples' needs all clients' data, and a server has none; set it to 'uniform'"
            )
        return super().server_problem(seeds, settings)

    def _module(self) -> ModuleType:
        assert self.module is not None
        return load_module(self.module, self.module_dir)

    def _call(self, module: ModuleType, name: str, *arguments: Any) -> Any:
        if not callable(getattr(module, name, None)):
            raise SpecError(
                f"`task.module` {self.module!r} has no function {name}(); it needs model() and data(client)"
            )
        return called(getattr(module, name), f"`task.module` {self.module!r}: {name}", *arguments)


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _digest(data: Any) -> str:
    """A hash of sizes and sampled numbers; objects that are neither arrays nor containers count by type and length."""
    if isinstance(data, torch.Tensor):
        data = data.detach().cpu().numpy() if data.dtype != torch.bfloat16 else data.float().numpy()
    if (
        hasattr(data, "to_numpy") and hasattr(data, "iloc") and not hasattr(data, "columns")
    ):  # a pandas Series
        data = data.to_numpy()
    if isinstance(data, np.ndarray | np.generic) and data.dtype.kind == "O":
        data = data.tolist()
    if isinstance(data, np.ndarray | np.generic) and data.dtype.kind in "biufcSU":
        flat = np.ascontiguousarray(data).reshape(-1)
        step = max(1, len(flat) // SAMPLED)
        return _hash(f"{data.shape} {data.dtype}".encode() + flat[::step].tobytes())
    if isinstance(data, DataLoader):
        sampler = data.batch_sampler if data.batch_size is None else data.sampler
        return _hash(
            repr(
                (_digest(data.dataset), data.batch_size, data.drop_last, type(sampler).__name__)
            ).encode()
        )
    if not hasattr(data, "with_format"):  # a Hugging Face Dataset would be read as a whole
        data = table_columns(data) or data
    if isinstance(data, Mapping):
        return _hash(repr([(key, _digest(value)) for key, value in data.items()]).encode())
    tensors = getattr(data, "tensors", None)  # torch's TensorDataset
    if tensors is not None or (isinstance(data, list | tuple) and len(data) <= SAMPLED):
        return _hash(repr([_digest(value) for value in (tensors or data)]).encode())
    if isinstance(data, list | tuple):
        places = range(0, len(data), max(1, len(data) // SAMPLED))
        return _hash(repr([len(data), *(_digest(data[i]) for i in places)]).encode())
    if isinstance(data, str | int | float | bool | None):
        return repr(data)
    size = len(data) if hasattr(data, "__len__") else 0
    about = f"{type(data).__name__} {size}"
    return f"{about} {_examples(data, size)}" if size and hasattr(data, "__getitem__") else about


def _examples(data: Any, size: int) -> str:
    """A hash of a few examples of a Dataset; of none where they are drawn anew each time."""
    places = sorted({0, size // 3, 2 * size // 3, size - 1})
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch_generator():
            twice = [[_digest(data[place]) for place in places] for _ in range(2)]
    except Exception:  # what cannot be read is named when it is trained on
        return ""
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
    return _hash(repr(twice[0]).encode()) if twice[0] == twice[1] else ""
