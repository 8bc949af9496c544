"""A DataLoader as a client's data: its batches are kept, and fit's seed decides their order.

`batch_size`, `drop_last`, `collate_fn`, `shuffle`, `sampler` and `batch_sampler` count as they do in torch:

- `shuffle=True`: each pass is shuffled anew, by (seed, round, client, pass) alone.
- `shuffle=False`: batches in the order of the Dataset; a round goes on where the one before it has ended.
- A sampler of your own: torch's generators are seeded by (seed, round, client, pass) while it draws. One that draws
  from torch repeats to the bit; one that draws from elsewhere, or remembers earlier passes, does not.

`num_workers` does not count: examples are loaded by the process that trains.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from fedspan.core import seeds
from fedspan.core.errors import DataError
from fedspan.core.seeds import Keys
from fedspan.nn.client_data import Batch, ClientData

Key = Callable[[int], int]  # the key of a pass, by its number
FIXED = 0  # the key of the pass that stands for a sampler's examples


@dataclass(frozen=True, eq=False)
class Loader:
    """Examples that have batches of their own."""

    data: ClientData
    examples: torch.Tensor | None  # numbers in `data` of one pass; None: all, each once
    batch_size: int  # of most batches
    drop_last: bool = False
    ordered: bool = False
    sampler: Any = None  # gives the batches of a pass as lists of numbers; None: they are cut from a shuffled pass

    def __len__(self) -> int:
        return len(self.data) if self.examples is None else len(self.examples)

    def take(self, index: torch.Tensor) -> Batch:
        """A batch of the examples with these places in a pass."""
        return self.data.take(index if self.examples is None else self.examples[index])

    @property
    def steps_per_epoch(self) -> float:
        """Batches in one pass."""
        return (
            len(self.sampler) if self.sampler is not None else max(1, len(self) / self.batch_size)
        )

    def draw(self, key: Key, first: int) -> Iterator[torch.Tensor]:
        """The examples of a round's batches, pass after pass, by their numbers in `data`.

        Where order is kept, `first` batches come before the round.
        """
        for passed in itertools.count():
            found = self._pass(key(passed))
            if self.ordered and passed == 0:
                found = found[first % len(found) :]
            yield from found

    def _pass(self, key: int) -> list[torch.Tensor]:
        if self.sampler is not None:
            return drawn_batches(self.sampler, key)
        n = len(self)
        order = torch.arange(n) if self.ordered else permutation(key, n)
        found = list(order.split(self.batch_size))
        return found[:-1] if self.drop_last and len(found[-1]) < self.batch_size else found


def permutation(key: int, n: int) -> torch.Tensor:
    """A shuffled pass over n examples."""
    return torch.from_numpy(seeds.permute(np.array([key], np.uint64), n)[0])


def shuffled(data: ClientData, batch_size: int, key: Key) -> Iterator[torch.Tensor]:
    """Batches of one size by shuffled passes; one that a pass cannot fill goes on with the next pass."""
    n = len(data)
    size = min(batch_size, n)
    left = torch.empty(0, dtype=torch.int64)
    for passed in itertools.count():
        left = torch.cat([left, permutation(key(passed), n)])
        while len(left) >= size:
            yield left[:size]
            left = left[size:]


def shuffled_examples(of: Keys, n: int, start: int, count: int) -> torch.Tensor:
    """`count` numbers from place `start` on of the shuffled passes of several clients with n examples each.

    They are those of `shuffled`, pass after pass; `of` has one key per client.
    """
    passes = range(start // n, -(-(start + count) // n))
    drawn = [seeds.permute(seeds.children(of, np.array(passed)), n) for passed in passes]
    return torch.from_numpy(np.concatenate(drawn, -1))[:, start % n :][:, :count]


def batches(
    data: ClientData, batch_size: int, key: Key, first: int
) -> Iterator[tuple[ClientData, torch.Tensor]]:
    """The batches of a client's round without end: what to take from, and which examples."""
    if isinstance(data, Loader):
        return ((data.data, index) for index in data.draw(key, first))
    return ((data, index) for index in shuffled(data, batch_size, key))


def batch_size_of(data: ClientData, default: int) -> int:
    """The examples of a batch: the loader's own number, or else the run's."""
    return min(data.batch_size if isinstance(data, Loader) else default, len(data))


def steps_per_epoch(data: ClientData, batch_size: int) -> float:
    """Batches in one pass over a client's examples."""
    return data.steps_per_epoch if isinstance(data, Loader) else len(data) / batch_size


def from_loader(loader: DataLoader[Any], read: Callable[[Any], ClientData], who: str) -> Loader:
    """The data of a DataLoader; `read` makes client data of its Dataset."""
    data, sampler = read(loader.dataset), loader.batch_sampler
    if sampler is None:
        raise DataError(f"{who} is a DataLoader with `batch_size=None`; give it a batch size")
    if loader.num_workers:
        warnings.warn(
            "`num_workers` of a DataLoader counts for nothing; the process that trains loads the examples",
            stacklevel=2,
        )
    if type(sampler) is not BatchSampler or not _plain(sampler.sampler, len(data)):
        return _sampled(data, sampler, who)
    size, drop = int(sampler.batch_size), bool(sampler.drop_last)
    if drop and len(data) < size:
        raise DataError(
            f"{who} has {len(data)} examples and no full batch of {size}; leave out `drop_last=True`"
        )
    return Loader(data, None, size, drop, ordered=type(sampler.sampler) is SequentialSampler)


def _plain(sampler: Any, n: int) -> bool:
    """Whether a sampler goes over all examples once, in order or shuffled."""
    shuffles = type(sampler) is RandomSampler and not sampler.replacement
    return (shuffles or type(sampler) is SequentialSampler) and len(sampler) == n


def _sampled(data: ClientData, sampler: Any, who: str) -> Loader:
    """Data whose batches a sampler draws; one fixed pass of it stands for the client's examples."""
    try:
        found = drawn_batches(sampler, FIXED)
    except TypeError as error:  # such as one without a length
        raise DataError(
            f"{who} has a {type(sampler).__name__} that cannot be used: {error}"
        ) from None
    if not found:
        raise DataError(f"{who} has a {type(sampler).__name__} that gives no batch")
    return Loader(data, torch.cat(found), max(len(batch) for batch in found), sampler=sampler)


def drawn_batches(batches: Any, key: int) -> list[torch.Tensor]:
    """One pass of a batch sampler, with every generator of torch that it may draw from seeded by `key`."""
    sampler = getattr(batches, "sampler", batches)
    own = getattr(sampler, "generator", None)
    for one in (sampler, batches):
        if hasattr(one, "set_epoch"):
            one.set_epoch(key % (1 << 31))
    with drawing(key, torch.device("cpu"), own):
        return [
            torch.as_tensor(list(batch)) for batch in itertools.islice(iter(batches), len(batches))
        ]


def drawing(
    key: int, device: torch.device, also: torch.Generator | None = None
) -> contextlib.AbstractContextManager[None]:
    """Torch's own generators start at `key`, and are restored afterwards."""
    more = [] if also is None else [also]
    if device.type == "cuda":
        more.append(torch.cuda.default_generators[device.index or 0])
    return seeds.torch_generator(key >> 1, *more)
