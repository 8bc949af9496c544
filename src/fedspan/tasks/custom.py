"""A model and data of your own: objects given to `fedspan.fit`, or a Python module with `model()` and `data(client)`.

A module may also have `test()` and `validation()`, the data that the server evaluates on, and `loss(outputs, targets)`.
With more than 10,000 clients `data` is called when a client takes part; `sizes()`, the numbers of examples that weights
and epochs need, then spares a call for every client.
A Hugging Face model is trained by its own loss, on tokenized text. Across machines a client calls `model` and `data`
alone, the server `model`, `test` and `validation`.
"""

import copy
import functools
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from fedspan.core.digest import digest, module_text, source_of
from fedspan.core.errors import SpecError, at_least, one_line
from fedspan.core.plugins import called, load_module
from fedspan.core.registry import register
from fedspan.core.seeds import torch_generator
from fedspan.nn.batches import Clients
from fedspan.nn.client_data import table_columns
from fedspan.tasks._module import Material, ModuleTask, checked_model

STATISTICS = (
    "running_mean",
    "running_var",
    "num_batches_tracked",
)  # of norms; training changes them
SAMPLED = 64  # numbers of an array that are looked at to tell it from another


@register
@dataclass(frozen=True, kw_only=True)
class Custom(ModuleTask):
    """Your own model and data."""

    module: str | None = None  # import name or path of a Python file with model() and data(client)
    clients: int | None = None  # number of clients of the module
    module_dir: str | None = None  # where the module is looked for; None: beside the spec file
    objects: Material | None = field(
        default=None, repr=False, compare=False
    )  # set by `fedspan.fit`

    def __post_init__(self) -> None:
        if self.objects is None:
            if self.module is None:
                raise SpecError(
                    "`task.module` is missing: a Python file with model() and data(client)"
                )
            at_least("task.clients", self.clients or 0, 1)

    def given(self) -> dict[str, Any] | None:
        """Sizes and sampled hashes of objects, by which a changed model, loss or data set is noticed."""
        return None if self.objects is None else dict(self._description)

    @functools.cached_property
    def _description(self) -> dict[str, Any]:
        given = self.objects
        assert given is not None
        trained = {name for name, value in given.model.named_parameters() if value.requires_grad}
        state = given.model.state_dict()
        shapes = [(name, tuple(value.shape)) for name, value in state.items()]
        frozen = [
            _digest(value)
            for name, value in state.items()
            if name not in trained and name.rpartition(".")[2] not in STATISTICS
        ]
        table: dict[str, Any] = {
            "name": "custom",
            "model": digest(repr((shapes, module_text(given.model), frozen))),
            "data": _digest(given.clients),
            "clients": len(given.clients),
        }
        parts = {"test": given.test, "validation": given.validation}
        table |= {name: _digest(one) for name, one in parts.items() if one is not None}
        functions = {"loss": given.loss, "objective": given.objective}
        return table | {name: source_of(one) for name, one in functions.items() if one is not None}

    def fingerprint(self) -> dict[str, Any]:
        """Where the module is does not decide the numbers."""
        return {"module_dir": None}

    def material(self, seed: int, dtype: torch.dtype) -> Material:
        """The objects, or what the module's functions give; none is called for data that is not needed here."""
        if self.objects is not None:
            try:
                return replace(self.objects, model=copy.deepcopy(self.objects.model))
            except Exception as error:
                raise SpecError(
                    f"`model` cannot be copied, and every run trains a copy: {one_line(error)}; remove the attribute, "
                    "or define __deepcopy__"
                ) from error
        assert self.module is not None
        assert self.clients is not None
        module, what = load_module(self.module, self.module_dir), f"`task.module` {self.module!r}"

        def call(name: str, *arguments: Any) -> Any:
            if not callable(getattr(module, name, None)):
                raise SpecError(
                    f"{what} has no function {name}(); it needs model() and data(client)"
                )
            return called(getattr(module, name), f"{what}: {name}", *arguments)

        def given(name: str) -> Any:
            return call(name) if hasattr(module, name) else None

        with torch_generator(seed):
            model = checked_model(call("model"), f"{what}: model() must return")
        if not any(p.dtype == torch.bfloat16 for p in model.parameters()):
            model = model.to(dtype)  # the x of bfloat16 weights has the run's type all the same
        return Material(
            model,
            Clients(
                self.clients,
                lambda ids: [call("data", client) for client in ids],
                lambda: given("sizes"),
            ),
            lambda: given("test"),
            lambda: given("validation"),
            getattr(module, "loss", None),
        )


def _digest(data: Any) -> str:
    """A hash of sizes and sampled numbers; objects that are neither arrays nor containers count by type and length."""
    parts: list[Any] | None = None
    if isinstance(data, torch.Tensor):
        data = (data.float() if data.dtype == torch.bfloat16 else data).detach().cpu().numpy()
    if hasattr(data, "iloc") and not hasattr(data, "columns"):  # a pandas Series
        data = data.to_numpy()
    if isinstance(data, np.ndarray | np.generic) and data.dtype.kind in "biufcSU":
        flat = np.ascontiguousarray(data).reshape(-1)
        step = max(1, len(flat) // SAMPLED)
        return digest(f"{data.shape} {data.dtype}", flat[::step].tobytes())
    if not hasattr(data, "with_format"):  # a Hugging Face Dataset would be read as a whole
        data = table_columns(data) or data
    if isinstance(data, DataLoader):
        sampler = data.batch_sampler if data.batch_size is None else data.sampler
        parts = [data.dataset, data.batch_size, data.drop_last, type(sampler).__name__]
    elif isinstance(data, Mapping):
        parts = list(data.items())
    elif (tensors := getattr(data, "tensors", None)) is not None:  # torch's TensorDataset
        parts = list(tensors)
    elif isinstance(data, list | tuple | np.ndarray):
        parts = [len(data), *data[:: max(1, len(data) // SAMPLED)]]
    if parts is not None:
        return digest(repr([_digest(part) for part in parts]))
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
            once, again = ([_digest(data[place]) for place in places] for _ in range(2))
    except Exception:  # what cannot be read is named when it is trained on
        return ""
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
    return digest(repr(once)) if once == again else ""
