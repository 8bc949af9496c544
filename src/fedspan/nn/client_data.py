"""A client's examples, in whatever form a user gives them: tensors, arrays, lists, tables, Datasets, DataLoaders."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from fedspan.core.errors import DataError, FedspanError, one_line

KEPT = 256  # clients of a large population whose data stays in memory
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
    """Examples fetched one by one from a Dataset or a list."""

    data: Any
    collate: Callable[[list[Any]], Batch] = default_collate
    who: str = "a client"  # whose they are, for error messages

    def __len__(self) -> int:
        return len(self.data)

    def take(self, index: torch.Tensor) -> Batch:
        """The items, collated."""
        rows: list[Any] = []
        try:
            rows.extend(self.data[i] for i in index.tolist())
            return self.collate(rows)
        except FedspanError:
            raise
        except Exception as error:
            read = len(rows) == len(index)
            what = (
                "examples cannot be joined to a batch"
                if read
                else f"example {int(index[len(rows)])} cannot be read"
            )
            raise DataError(f"{self.who}: {what}: {one_line(error)}") from error


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


class ReadLater(Sequence[ClientData]):
    """The data of a large population: each client's is read when it takes part, and the latest are kept."""

    def __init__(
        self, clients: int, read: Callable[[int], ClientData], sizes: Sequence[int] | None
    ) -> None:
        self.clients, self.sizes = (
            clients,
            sizes,
        )  # numbers of examples, where they are known without reading
        self._read = functools.lru_cache(maxsize=KEPT)(read)

    def __len__(self) -> int:
        return self.clients

    def __getitem__(self, client: Any) -> Any:
        if not 0 <= client < self.clients:
            raise IndexError(client)
        return self._read(client)


def sizes_of(clients: Sequence[ClientData]) -> npt.NDArray[np.float64]:
    """The number of examples of each client."""
    known = clients.sizes if isinstance(clients, ReadLater) else None
    return np.array([len(data) for data in clients] if known is None else known, np.float64)


def client_name(client: int, names: Sequence[str] | None) -> str:
    """A client as error messages name it."""
    return f"client {client}" if names is None else f"client {names[client]!r}"


def split_parts(data: Any, who: str) -> tuple[Any, str, Any]:
    """(training data, name of the held-out part, held-out data) of what a user gives for a client.

    A client's data may be a mapping with "train" and one or both of "test" and "validation". Without a held-out part
    the client is evaluated on its training data.
    """
    if not isinstance(data, Mapping) or "train" not in data:
        return data, "train", None
    if unknown := sorted(map(str, data.keys() - {"train", "test", "validation"})):
        raise DataError(
            f"{who} has the part {unknown[0]!r}; the parts of a client are train, test and validation"
        )
    held = next((name for name in ("test", "validation") if name in data), "train")
    return data["train"], held, data[held] if held != "train" else None


def as_client_data(data: Any, who: str) -> ClientData:
    """The examples of one client, from what a user gives; errors name it as `who`."""
    from fedspan.nn.loaders import from_loader  # which builds on this module

    if isinstance(data, DataLoader):
        return from_loader(data, lambda dataset: of_dataset(dataset, data.collate_fn, who), who)
    if isinstance(data, Dataset):
        return of_dataset(data, default_collate, who)
    if (columns := table_columns(data)) is not None:
        data = columns
    if isinstance(data, Mapping):
        if not data:
            raise DataError(f"{who} has no columns; give it inputs and a target, or leave it out")
        arrays = {str(name): as_tensor(column, f"{who}: {name!r}") for name, column in data.items()}
        checked = _checked(arrays.values(), who, map(repr, arrays))
        return _not_empty(NamedTensors(dict(zip(arrays, checked, strict=True))), who)
    if (
        isinstance(data, list)
        and data
        and all(isinstance(row, tuple) and len(row) == 2 for row in data)
    ):
        return Items(data, who=who)
    if isinstance(data, list | tuple) and data:
        _check_index(data, who)
        names = (
            ("inputs", "targets")
            if len(data) == 2
            else [f"part {number}" for number in range(len(data))]
        )
        return _not_empty(
            Tensors(_checked((as_tensor(part, who) for part in data), who, names)), who
        )
    if isinstance(data, torch.Tensor | np.ndarray):
        raise DataError(
            f"{who} is one {_type(data)}; give (inputs, targets) for each client: [(x0, y0), (x1, y1)]"
        )
    if isinstance(data, ClientData):
        return _not_empty(data, who)
    wanted = "must be (inputs, targets), a table with a target column, a Dataset or a DataLoader"
    raise DataError(f"{who} {wanted}, got {_type(data)}")


def of_dataset(data: Any, collate: Callable[[list[Any]], Batch], who: str) -> ClientData:
    """The examples of a Dataset; those of a TensorDataset are taken all at once."""
    if isinstance(data, IterableDataset):
        raise DataError(
            f"{who} is a stream (IterableDataset) without a length; read it into a list of examples"
        )
    tensors = getattr(data, "tensors", None)
    if tensors is not None and collate is default_collate:
        return as_client_data(tuple(tensors), who)
    return _not_empty(Items(data, collate, who), who)


def table_columns(data: Any) -> dict[str, Any] | None:
    """Name → values of a pandas, Arrow or Hugging Face table; None for anything else."""
    if hasattr(data, "column_names") and hasattr(data, "with_format"):  # datasets.Dataset
        return dict(data.with_format(None)[:])
    if hasattr(data, "column_names") and hasattr(data, "to_pydict"):  # pyarrow.Table
        return dict(data.to_pydict())
    if hasattr(data, "columns") and hasattr(data, "iloc"):  # pandas.DataFrame
        return {
            str(name): np.array(data[name]) for name in data.columns
        }  # a copy that torch may write to
    return None


def _check_index(parts: Sequence[Any], who: str) -> None:
    """Refuses pandas objects whose rows have different labels: rows are paired by position."""
    indexes = [part.index for part in parts if hasattr(part, "iloc")]
    if any(not indexes[0].equals(index) for index in indexes[1:]):
        raise DataError(
            f"{who} has inputs and targets with different indexes, and rows are paired by position; bring them into "
            "one order, then reset_index(drop=True) on both"
        )


def as_tensor(part: Any, who: str) -> torch.Tensor:
    """A tensor from a tensor, an array, a pandas column or frame, or nested lists of numbers."""
    if isinstance(part, torch.Tensor):
        return _dense(part, who)
    if np.ma.is_masked(part):
        raise DataError(
            f"{who} has masked values, which would count as data; fill them by .filled() or drop the rows"
        )
    if hasattr(part, "iloc") and hasattr(part, "to_numpy"):
        part = part.to_numpy()
    if isinstance(part, np.ndarray) and part.dtype == object:
        part = part.tolist()
    if isinstance(part, list | tuple) and part and isinstance(part[0], torch.Tensor):
        part = [np.asarray(row) for row in part]
    try:
        array = np.asarray(part)
    except ValueError:
        raise DataError(
            f"{who} has rows of different lengths; pad them, or give a Dataset"
        ) from None
    if array.dtype.kind not in "biuf" or array.ndim == 0:
        found = "text" if array.dtype.kind in "US" else _type(part)
        raise DataError(
            f"{who} has {found} where numbers are needed; encode it as numbers (classes as 0, 1, 2, …)"
        )
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)
    return torch.as_tensor(array if array.flags.writeable else array.copy())


def _dense(part: torch.Tensor, who: str) -> torch.Tensor:
    """Refuses a tensor whose rows cannot be taken."""
    if part.is_meta:
        raise DataError(
            f"{who} has a tensor on the device 'meta', which has no values; load it on a real device"
        )
    if part.layout != torch.strided:
        kind = str(part.layout).removeprefix("torch.")
        raise DataError(f"{who} has a tensor of layout {kind!r}; make it dense by .to_dense()")
    if part.ndim == 0:
        raise DataError(
            f"{who} has a tensor of one number, {part.item()}; give one row per example"
        )
    return part


def _checked(
    data: Iterable[torch.Tensor], who: str, names: Iterable[str]
) -> tuple[torch.Tensor, ...]:
    """Tensors of equal length without a value that is not finite."""
    parts = tuple(data)
    if len({part.shape[0] for part in parts}) > 1:
        raise DataError(
            f"{who} has parts of different lengths: {[part.shape[0] for part in parts]}"
        )
    for part, name in zip(parts, names, strict=True):
        if part.is_floating_point() and not torch.isfinite(part).all():
            row, *places = torch.nonzero(~torch.isfinite(part))[0].tolist()
            column = f", column {places[0]}" if len(places) == 1 else ""
            raise DataError(
                f"{who} has values that are not finite: {name}, first in row {row}{column}; remove or fill them"
            )
    return parts


def narrowed(part: torch.Tensor, dtype: torch.dtype, who: str) -> torch.Tensor:
    """The values in a model's type; refuses one that it would take for ∞."""
    if part.is_complex() and not dtype.is_complex:
        raise DataError(
            f"{who} has complex numbers, and the model has none; give their parts as columns"
        )
    found = part.to(dtype)
    narrows = (
        part.dtype.is_floating_point
        and dtype.is_floating_point
        and dtype.itemsize < part.dtype.itemsize
    )
    if narrows and not torch.isfinite(found).all():
        kind = str(dtype).removeprefix("torch.")
        raise DataError(
            f"{who} has the value {part.abs().max():.3g}, which {kind} cannot hold; scale the column"
        )
    return found


def placed(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on a device."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, Mapping):
        return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
    return tuple(part.to(device) if isinstance(part, torch.Tensor) else part for part in batch)


def _not_empty(data: ClientData, who: str) -> ClientData:
    if not hasattr(data, "__len__") or (
        isinstance(data, Items) and not hasattr(data.data, "__len__")
    ):
        raise DataError(f"{who} has no length; give its Dataset a `__len__`")
    if len(data) == 0:
        raise DataError(f"{who} has no examples; leave it out")
    return data


def _type(value: Any) -> str:
    return type(value).__name__
