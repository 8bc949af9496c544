"""Clients' examples as a run holds them, and the batches that are drawn from them.

A DataLoader keeps its batches, and the run's seed decides their order. `batch_size`, `drop_last`, `collate_fn`,
`shuffle`, `sampler` and `batch_sampler` count as they do in torch:

- `shuffle=True`: each pass is shuffled anew, by (seed, round, client, pass) alone.
- `shuffle=False`: batches in the order of the Dataset; a round goes on where the one before it has ended.
- A sampler of your own: torch's generators are seeded by (seed, round, client, pass) while it draws. One that draws
  from torch repeats to the bit; one that draws from elsewhere, or remembers earlier passes, does not.

`num_workers` does not count: examples are loaded by the process that trains. `AUGMENT` has the random changes to
batches of images that `training.augment` may name.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from fedspan.core import seeds
from fedspan.core.config import Augment
from fedspan.core.errors import DataError, FedspanError, SpecError, one_line, one_of, shown
from fedspan.core.plugins import guarded

Batch = Any  # what a loss is given: usually (inputs, targets)
Loss = Callable[[nn.Module, Batch], Tensor]
Key = Callable[[int], int]  # the key of a pass, by its number
CPU = torch.device("cpu")


ClientData = Any
"""Examples that can be taken by number: it has a length, and `take(numbers)` gives a batch of them."""


def on_tensors(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """The batch with a function applied to each of its tensors."""
    if isinstance(batch, Mapping):
        return {name: on_tensors(function, one) for name, one in batch.items()}
    if isinstance(batch, list | tuple):
        return tuple(on_tensors(function, one) for one in batch)
    return function(batch) if isinstance(batch, Tensor) else batch


@dataclass(frozen=True, eq=False)
class Tensors:
    """Examples as tensors of equal length, in the form of a batch: a tuple or a mapping of them.

    The first part of a tuple may be a tuple or a mapping itself, of several inputs.
    """

    rows: Batch

    @functools.cached_property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors in order."""
        return tuple(tree_leaves(self.rows))

    @property
    def flat(self) -> bool:
        """Whether batches are tuples of tensors."""
        return all(isinstance(part, Tensor) for part in self.rows)

    def __len__(self) -> int:
        return self.parts[0].shape[0]

    def take(self, index: Tensor | slice) -> Batch:
        """Rows of each tensor."""
        return on_tensors(lambda part: part[index], self.rows)


@dataclass(frozen=True, eq=False)
class Items:
    """Examples fetched one by one from a Dataset or a list."""

    data: Any
    collate: Callable[[list[Any]], Batch] = default_collate
    who: str = "a client"  # whose they are, for error messages

    def __len__(self) -> int:
        return len(self.data)

    def take(self, index: Tensor) -> Batch:
        """The items, collated."""
        rows: list[Any] = []
        try:
            rows.extend(self.data[i] for i in index.tolist())
            return self.collate(rows)
        except FedspanError:
            raise
        except Exception as error:
            what = "examples cannot be joined to a batch"
            if len(rows) < len(index):
                what = f"example {int(index[len(rows)])} cannot be read"
            raise DataError(f"{self.who}: {what}: {one_line(error)}") from error


@dataclass(frozen=True, eq=False)
class Loader:
    """Examples that have batches of their own."""

    data: ClientData
    examples: Tensor  # numbers in `data` of one pass
    batch_size: int  # of most batches
    drop_last: bool = False
    ordered: bool = False
    sampler: Any = None  # gives the batches of a pass as lists of numbers; None: they are cut from a shuffled pass

    def __len__(self) -> int:
        return len(self.examples)

    def take(self, index: Tensor) -> Batch:
        """A batch of the examples with these places in a pass."""
        return self.data.take(self.examples[index])

    def draw(self, key: Key, first: int) -> Iterator[Tensor]:
        """The examples of a round's batches, pass after pass, by their numbers in `data`.

        Where order is kept, `first` batches come before the round.
        """
        for number in itertools.count():
            if self.sampler is not None:
                found = drawn_batches(self.sampler, key(number))
            else:
                order = self.examples if self.ordered else permutation(key(number), len(self))
                found = list(order.split(self.batch_size))
                if self.drop_last and len(found[-1]) < self.batch_size:
                    found.pop()
            yield from found[first % len(found) if self.ordered and number == 0 else 0 :]


@dataclass(eq=False)
class Clients(Sequence[Any]):
    """A sequence of N clients' data, each of which is read when it is asked for."""

    total: int  # N
    read: Callable[
        [Sequence[int]], Iterable[Any]
    ]  # gives the data of these clients, in their order
    known: Callable[[], Sequence[int] | None] = lambda: None  # gives `sizes`
    here: Any = None  # the clients whose data is on this machine; None: all

    def __post_init__(self) -> None:
        if self.here is None:
            self.here = range(self.total)

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, client: Any) -> Any:
        if not 0 <= client < self.total:
            raise IndexError(client)
        if client not in self.here:
            raise DataError(f"the data of client {client} is not on this machine")
        return next(iter(self.read([client])))

    @property
    def sizes(self) -> Sequence[int] | None:
        """The clients' numbers of examples; None: they are not known without reading."""
        return self.known()


def sizes_of(clients: Sequence[ClientData]) -> npt.NDArray[np.float64]:
    """The number of examples of each client."""
    known = getattr(clients, "sizes", None)
    return np.array([len(data) for data in clients] if known is None else known, np.float64)


def placed(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on a device."""
    return batch if device.type == "cpu" else on_tensors(lambda part: part.to(device), batch)


def permutation(key: int, n: int) -> Tensor:
    """A shuffled pass over n examples."""
    return torch.from_numpy(seeds.permute(np.array([key], np.uint64), n)[0])


def batches(
    data: ClientData, batch_size: int, key: Key, first: int
) -> Iterator[tuple[ClientData, Tensor]]:
    """The batches of a client's round without end: what to take from, and which examples.

    Those of a DataLoader are its own. Others have one size, and one that a shuffled pass cannot fill goes on with the
    next pass.
    """
    if isinstance(data, Loader):
        yield from ((data.data, index) for index in data.draw(key, first))
    size, left = min(batch_size, len(data)), torch.empty(0, dtype=torch.int64)
    for number in itertools.count():
        left = torch.cat([left, permutation(key(number), len(data))])
        while len(left) >= size:
            yield data, left[:size]
            left = left[size:]


def batch_size_of(data: ClientData, default: int) -> int:
    """The examples of a batch: the loader's own number, or else the run's."""
    return min(data.batch_size if isinstance(data, Loader) else default, len(data))


def steps_per_epoch(data: ClientData, batch_size: int) -> float:
    """Batches in one pass over a client's examples."""
    if not isinstance(data, Loader):
        return len(data) / batch_size
    return len(data.sampler) if data.sampler is not None else max(1, len(data) / data.batch_size)


def drawn_batches(sampler: Any, key: int) -> list[Tensor]:
    """One pass of a batch sampler, with every generator of torch that it may draw from seeded by `key`."""
    inner = getattr(sampler, "sampler", sampler)
    with drawing(key, also=getattr(inner, "generator", None)):
        found = itertools.islice(iter(sampler), len(sampler))
        return [torch.as_tensor(list(batch)) for batch in found]


def drawing(
    key: int, device: torch.device = CPU, also: torch.Generator | None = None
) -> contextlib.AbstractContextManager[None]:
    """Torch's own generators start at `key`, and are restored afterwards."""
    more = [] if also is None else [also]
    if device.type == "cuda":
        more.append(torch.cuda.default_generators[device.index or 0])
    return seeds.torch_generator(key >> 1, *more)


def augmentation(given: str | Augment | None) -> Augment | None:
    """The function that a name stands for, or a user's own function, with its batches checked."""
    if isinstance(given, str):
        one_of("augment", given, AUGMENT)
        return functools.partial(_checked, AUGMENT[given], f"`augment` {given!r}")
    name = getattr(given, "__name__", type(given).__name__)
    return given and functools.partial(_checked, given, f"`augment` {name}")


def _checked(function: Augment, what: str, batch: Batch, generator: torch.Generator) -> Batch:
    """The batch that a function makes of another; it must have the same parts, and all of them as many rows."""
    call = functools.partial(function, batch, generator)
    found = guarded(call, f"{what}, a function of (batch, generator), fails")
    given = found if isinstance(found, Mapping | list | tuple) else ()
    old, new = (dict(one if isinstance(one, Mapping) else enumerate(one)) for one in (batch, given))
    rows = {len(part) for part in new.values() if isinstance(part, Tensor)}
    kinds = [{key: type(part) for key, part in one.items()} for one in (old, new)]
    if kinds[0] == kinds[1] and len(rows) <= 1:
        return found if isinstance(batch, Mapping) else tuple(found)
    shapes = [on_tensors(lambda part: tuple(part.shape), one) for one in (batch, found)]  # type: ignore[arg-type, return-value]
    raise SpecError(
        f"{what} must return a batch such as it gets, of shapes {shapes[0]}, got {shown(shapes[1])}"
    )


def flip(batch: Batch, generator: torch.Generator) -> Batch:
    """Flips half of the images from left to right."""
    x, y = batch
    if x.dim() != 4:
        raise SpecError(
            f"it is for images, (channels, height, width) each; examples here are {tuple(x.shape[1:])}"
        )
    which = torch.rand(len(x), generator=generator) < 0.5
    return torch.where(which.view(-1, 1, 1, 1).to(x.device), x.flip(3), x), y


def crop(batch: Batch, generator: torch.Generator) -> Batch:
    """Pads the images by 4 empty pixels, crops them at random places, and flips half of them."""
    x, y = flip(batch, generator)
    n, _, height, width = x.shape
    down, across = torch.randint(0, 9, (2, n, 1), generator=generator)
    rows, columns = down + torch.arange(height), across + torch.arange(width)
    padded = F.pad(x, (4, 4, 4, 4)).permute(0, 2, 3, 1)
    picked = padded[torch.arange(n).view(-1, 1, 1), rows.unsqueeze(2), columns.unsqueeze(1)]
    return picked.permute(0, 3, 1, 2).contiguous(), y


AUGMENT = {"flip": flip, "crop": crop}
