"""A client's examples, whatever they came as: tensors, arrays, a Dataset or a DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

from fedspan.core.errors import DataError

Batch = Any  # what a loss is given: usually (inputs, targets)
Loss = Callable[[nn.Module, Batch], torch.Tensor]


class ClientData(Protocol):
    """Examples that can be taken by number."""

    def __len__(self) -> int:
        """How many there are."""

    def take(self, index: torch.Tensor) -> Batch:
        """A batch of the examples with these numbers."""


@dataclass(frozen=True, eq=False)
class Tensors:
    """Examples held as tensors of equal length."""

    parts: tuple[torch.Tensor, ...]

    def __len__(self) -> int:
        return self.parts[0].shape[0]

    def take(self, index: torch.Tensor) -> Batch:
        """Rows of each tensor."""
        return tuple(part[index] for part in self.parts)


@dataclass(frozen=True, eq=False)
class Named:
    """The same with a name for each tensor; a batch has the names too."""

    parts: Mapping[str, torch.Tensor]

    def __len__(self) -> int:
        return len(next(iter(self.parts.values())))

    def take(self, index: torch.Tensor) -> Batch:
        """Rows of each tensor."""
        return {name: part[index] for name, part in self.parts.items()}


@dataclass(frozen=True, eq=False)
class Items:
    """Examples fetched one by one from a Dataset."""

    data: Dataset[Any]
    collate: Callable[[list[Any]], Batch] = default_collate

    def __len__(self) -> int:
        return len(self.data)  # type: ignore[arg-type]

    def take(self, index: torch.Tensor) -> Batch:
        """The items, collated."""
        return self.collate([self.data[i] for i in index.tolist()])


def as_client_data(data: Any, who: str) -> ClientData:
    """A Source from what a user gives for one client."""
    if isinstance(data, DataLoader):
        return as_client_data(Items(data.dataset, data.collate_fn), who)
    if isinstance(data, Dataset):
        tensors = getattr(data, "tensors", None)
        return as_client_data(tuple(tensors), who) if tensors is not None else _filled(Items(data), who)
    if isinstance(data, Sequence) and data and all(isinstance(part, torch.Tensor | np.ndarray) for part in data):
        return _filled(Tensors(_checked(data, who)), who)
    if isinstance(data, Mapping) and data and all(isinstance(v, torch.Tensor | np.ndarray) for v in data.values()):
        return _filled(Named(dict(zip(data, _checked(data.values(), who), strict=True))), who)
    if hasattr(data, "take") and hasattr(data, "__len__"):
        return _filled(data, who)
    raise DataError(f"{who} must be (inputs, targets), a Dataset or a DataLoader, got {type(data).__name__}")


def _checked(data: Iterable[Any], who: str) -> tuple[torch.Tensor, ...]:
    """Tensors of equal length without a value that is not finite."""
    parts = tuple(torch.as_tensor(part) for part in data)
    if len({part.shape[0] for part in parts}) > 1:
        raise DataError(f"{who} has parts of different lengths: {[part.shape[0] for part in parts]}")
    for part in parts:
        if part.is_floating_point() and not torch.isfinite(part).all():
            raise DataError(f"{who} has values that are not finite; remove or fill them")
    return parts


def placed(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on a device."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, Mapping):
        return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
    return tuple(part.to(device) if isinstance(part, torch.Tensor) else part for part in batch)


def _filled(source: ClientData, who: str) -> ClientData:
    if len(source) == 0:
        raise DataError(f"{who} has no examples; leave it out")
    return source
