"""A client's examples, whatever they came as: tensors, arrays, a Dataset or a DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

from fedspan.core.errors import DataError

Batch = Any  # what a loss is given: usually (inputs, targets)
Loss = Callable[[nn.Module, Batch], torch.Tensor]


@runtime_checkable
class ClientData(Protocol):
    """Examples that can be taken by number."""

    def __len__(self) -> int:
        """The number of examples."""

    def take(self, index: torch.Tensor) -> Batch:
        """A batch of the examples with these numbers."""


@dataclass(frozen=True, eq=False)
class Tensors:
    """Examples as tensors of equal length."""

    parts: tuple[torch.Tensor, ...]

    def __len__(self) -> int:
        return self.parts[0].shape[0]

    def take(self, index: torch.Tensor) -> Batch:
        """Rows of each tensor."""
        return tuple(part[index] for part in self.parts)


@dataclass(frozen=True, eq=False)
class NamedTensors:
    """The same with a name for each tensor; a batch is a mapping with the same names."""

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


class LocalClients(Sequence[ClientData]):
    """The data of N clients, of whom only some are on this machine."""

    def __init__(self, held: Mapping[int, ClientData], clients: int) -> None:
        self.held, self.clients = held, clients

    def __len__(self) -> int:
        return self.clients

    def __getitem__(self, client: Any) -> Any:
        if client not in self.held:
            raise DataError(f"the data of client {client} is not on this machine")
        return self.held[client]

    @property
    def here(self) -> list[ClientData]:
        """The data of those that are."""
        return list(self.held.values())


def as_client_data(data: Any, who: str) -> ClientData:
    """The examples of one client, from what a user gives; errors name it as `who`."""
    if isinstance(data, DataLoader):
        return as_client_data(Items(data.dataset, data.collate_fn), who)
    if isinstance(data, Dataset):
        tensors = getattr(data, "tensors", None)
        return as_client_data(tuple(tensors), who) if tensors is not None else _not_empty(Items(data), who)
    if isinstance(data, Sequence) and data and all(isinstance(part, torch.Tensor | np.ndarray) for part in data):
        return _not_empty(Tensors(_checked(data, who)), who)
    if isinstance(data, Mapping) and data and all(isinstance(v, torch.Tensor | np.ndarray) for v in data.values()):
        return _not_empty(NamedTensors(dict(zip(data, _checked(data.values(), who), strict=True))), who)
    if isinstance(data, ClientData):
        return _not_empty(data, who)
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


def _not_empty(data: ClientData, who: str) -> ClientData:
    if len(data) == 0:
        raise DataError(f"{who} has no examples; leave it out")
    return data
