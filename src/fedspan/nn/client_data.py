"""Reads a client's examples in any form: tensors, arrays, lists, tables, Datasets or DataLoaders."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from fedspan.core.errors import DataError
from fedspan.nn.batches import Batch, ClientData, Items, Loader, Tensors, drawn_batches


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
    return data["train"], held, None if held == "train" else data[held]


def as_client_data(data: Any, who: str) -> ClientData:
    """The examples of one client, from what a user gives; errors name it as `who`."""
    if isinstance(data, DataLoader):
        return of_loader(data, who)
    if isinstance(data, Dataset):
        return of_dataset(data, default_collate, who)
    if (columns := table_columns(data)) is not None:
        data = columns
    if isinstance(data, Tensor | np.ndarray):
        raise DataError(
            f"{who} is one {type(data).__name__}; give (inputs, targets) for each client: [(x0, y0), (x1, y1)]"
        )
    if isinstance(data, Mapping):
        if not data:
            raise DataError(f"{who} has no columns; give it inputs and a target, or leave it out")
        rows = _named(data, who)
        return _checked(rows, {repr(name): part for name, part in rows.items()}, who)
    if isinstance(data, list | tuple) and data:
        pairs = all(isinstance(row, tuple) and len(row) == 2 for row in data)
        if isinstance(data, list) and pairs:
            return Items(data, who=who)
        if len(data) == 2 and (several := _several(data[0])):
            inputs, target = _named(several, who), as_tensor(data[1], who)
            parts = {repr(name): part for name, part in inputs.items()} | {"targets": target}
            first = inputs if isinstance(data[0], Mapping) else tuple(inputs.values())
            return _checked((first, target), parts, who)
        indexes = [part.index for part in data if hasattr(part, "iloc")]
        if any(not indexes[0].equals(index) for index in indexes[1:]):
            raise DataError(
                f"{who} has inputs and targets with different indexes, and rows are paired by position; bring them "
                "into one order, then reset_index(drop=True) on both"
            )
        names = ["inputs", "targets"] if len(data) == 2 else [f"part {n}" for n in range(len(data))]
        parts = {name: as_tensor(part, who) for name, part in zip(names, data, strict=True)}
        return _checked(tuple(parts.values()), parts, who)
    if hasattr(data, "take") and hasattr(data, "__len__"):  # examples of a class of one's own
        return _not_empty(data, who)
    raise DataError(
        f"{who} must be (inputs, targets), a table with a target column, a Dataset or a DataLoader, got "
        f"{type(data).__name__}"
    )


def _named(columns: Mapping[Any, Any], who: str) -> dict[Any, Tensor]:
    """Name → tensor."""
    return {name: as_tensor(one, f"{who}: {name!r}") for name, one in columns.items()}


def _several(inputs: Any) -> dict[Any, Any]:
    """Name or number → values of several inputs: a dictionary, or a tuple of tensors or arrays."""
    if isinstance(inputs, Mapping):
        return {str(name): one for name, one in inputs.items()}
    tensors = isinstance(inputs, tuple) and all(
        isinstance(one, Tensor | np.ndarray) and one.ndim for one in inputs
    )
    return dict(enumerate(inputs)) if tensors else {}


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


def of_loader(loader: DataLoader[Any], who: str) -> Loader:
    """The examples of a DataLoader, with its batches."""
    data, batches = of_dataset(loader.dataset, loader.collate_fn, who), loader.batch_sampler
    if batches is None:
        raise DataError(f"{who} is a DataLoader with `batch_size=None`; give it a batch size")
    if loader.num_workers:
        warnings.warn(
            "`num_workers` of a DataLoader counts for nothing; the process that trains loads the examples",
            stacklevel=2,
        )
    sampler: Any = getattr(batches, "sampler", None)
    ordered = type(sampler) is SequentialSampler
    shuffled = type(sampler) is RandomSampler and not sampler.replacement
    if type(batches) is BatchSampler and (ordered or shuffled) and len(sampler) == len(data):
        size, drop = int(batches.batch_size), bool(batches.drop_last)
        if drop and len(data) < size:
            raise DataError(
                f"{who} has {len(data)} examples and no full batch of {size}; leave out `drop_last=True`"
            )
        return Loader(data, torch.arange(len(data)), size, drop, ordered)
    try:  # one fixed pass stands for the client's examples
        found = drawn_batches(batches, 0)
    except TypeError as error:  # such as one without a length
        raise DataError(
            f"{who} has a {type(batches).__name__} that cannot be used: {error}"
        ) from None
    if not found:
        raise DataError(f"{who} has a {type(batches).__name__} that gives no batch")
    return Loader(data, torch.cat(found), max(map(len, found)), sampler=batches)


def table_columns(data: Any) -> dict[str, Any] | None:
    """Name → values of a pandas, Arrow or Hugging Face table; None for anything else."""
    if hasattr(data, "with_format"):  # datasets.Dataset
        return dict(data.with_format(None)[:])
    if hasattr(data, "to_pydict"):  # pyarrow.Table
        return dict(data.to_pydict())
    if is_frame(data):
        return {str(name): np.array(data[name]) for name in data.columns}  # torch may write to them
    return None


def is_frame(data: Any) -> bool:
    """Whether data is a pandas.DataFrame."""
    return hasattr(data, "columns") and hasattr(data, "iloc")


def as_tensor(part: Any, who: str) -> Tensor:
    """A tensor from a tensor, an array, a pandas column or frame, or nested lists of numbers."""
    if isinstance(part, Tensor):
        if part.is_meta or part.layout != torch.strided:
            raise DataError(
                f"{who} has a tensor without dense values ({part.device.type!r}, {part.layout}); load it on a real "
                "device, or make it dense by .to_dense()"
            )
        if part.ndim == 0:
            raise DataError(
                f"{who} has a tensor of one number, {part.item()}; give one row per example"
            )
        return part
    if np.ma.is_masked(part):
        raise DataError(
            f"{who} has masked values, which would count as data; fill them by .filled() or drop the rows"
        )
    if hasattr(part, "iloc") and hasattr(part, "to_numpy"):
        part = part.to_numpy()
    if isinstance(part, np.ndarray) and part.dtype == object:
        part = part.tolist()
    if isinstance(part, list | tuple) and part and isinstance(part[0], Tensor):
        part = [np.asarray(row) for row in part]
    try:
        array = np.asarray(part)
    except ValueError:
        raise DataError(
            f"{who} has rows of different lengths; pad them, or give a Dataset"
        ) from None
    if array.dtype.kind not in "biuf" or array.ndim == 0:
        found = "text" if array.dtype.kind in "US" else type(part).__name__
        raise DataError(
            f"{who} has {found} where numbers are needed; encode it as numbers (classes as 0, 1, 2, …)"
        )
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)
    return torch.as_tensor(array if array.flags.writeable else array.copy())


def _checked(rows: Batch, parts: Mapping[str, Tensor], who: str) -> ClientData:
    """Examples as tensors, which must be of equal length and finite; `parts` are the tensors by name."""
    lengths = [len(part) for part in parts.values()]
    if len(set(lengths)) > 1:
        raise DataError(f"{who} has parts of different lengths: {lengths}")
    for name, part in parts.items():
        if part.is_floating_point() and not torch.isfinite(part).all():
            row, *places = torch.nonzero(~torch.isfinite(part))[0].tolist()
            column = f", column {places[0]}" if len(places) == 1 else ""
            raise DataError(
                f"{who} has values that are not finite: {name}, first in row {row}{column}; remove or fill them"
            )
    return _not_empty(Tensors(rows), who)


def narrowed(part: Tensor, dtype: torch.dtype, who: str) -> Tensor:
    """The values in a model's type; refuses one that it would take for ∞."""
    if part.is_complex() and not dtype.is_complex:
        raise DataError(
            f"{who} has complex numbers, and the model has none; give their parts as columns"
        )
    found = part.to(dtype)
    shorter = part.is_floating_point() and dtype.itemsize < part.dtype.itemsize
    if shorter and dtype.is_floating_point and not torch.isfinite(found).all():
        kind = str(dtype).removeprefix("torch.")
        raise DataError(
            f"{who} has the value {part.abs().max():.3g}, which {kind} cannot hold; scale the column"
        )
    return found


def _not_empty(data: ClientData, who: str) -> ClientData:
    if isinstance(data, Items) and not hasattr(data.data, "__len__"):
        raise DataError(f"{who} has no length; give its Dataset a `__len__`")
    if len(data) == 0:
        raise DataError(f"{who} has no examples; leave it out")
    return data
