"""A DataLoader as a client: its batches count as they do in torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)  # fmt: skip

import fedspan
from fedspan.core.errors import DataError, SpecError
from fedspan.methods import FedAvg
from fedspan.nn.batches import batches, steps_per_epoch
from fedspan.nn.client_data import as_client_data

N = 10
NUMBERS = TensorDataset(torch.arange(float(N)).unsqueeze(1), torch.zeros(N, dtype=torch.int64))


def drawn(loader: DataLoader[Any], count: int, seed: int = 0, first: int = 0) -> list[list[int]]:
    """The examples of the first batches of a round."""
    found = batches(
        as_client_data(loader, "client 0"), 32, lambda passed: 1000 * (seed + 1) + passed, first
    )
    return [
        [int(x) for x in data.take(index)[0]]
        for _, (data, index) in zip(range(count), found, strict=False)
    ]


def test_passes_are_shuffled_and_end_as_the_loader_says() -> None:
    whole = drawn(DataLoader(NUMBERS, batch_size=4, shuffle=True), 3)
    assert [len(batch) for batch in whole] == [4, 4, 2]
    assert sorted(number for batch in whole for number in batch) == list(range(N))
    assert [
        len(batch) for batch in drawn(DataLoader(NUMBERS, 4, shuffle=True, drop_last=True), 4)
    ] == [4, 4, 4, 4]
    assert (
        whole
        == drawn(DataLoader(NUMBERS, batch_size=4, shuffle=True), 3)
        != drawn(DataLoader(NUMBERS, batch_size=4, shuffle=True), 3, seed=1)
    )


def test_without_shuffling_batches_come_in_order_and_go_on_in_the_next_round() -> None:
    loader = DataLoader(NUMBERS, batch_size=4)
    assert drawn(loader, 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert drawn(loader, 3, first=2) == [[8, 9], [0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: WeightedRandomSampler([1.0] * 3 + [0.0] * 7, 8),
        lambda: SubsetRandomSampler([0, 1, 2]),
        lambda: RandomSampler(range(3), replacement=True, num_samples=8),
        lambda: RandomSampler(range(3), generator=torch.Generator().manual_seed(5)),
    ],
)
def test_a_sampler_is_honored_and_repeats(sampler: Any) -> None:
    torch.manual_seed(0)
    one = drawn(DataLoader(NUMBERS, batch_size=4, sampler=sampler()), 4)
    torch.manual_seed(1)
    loader = DataLoader(NUMBERS, batch_size=4, sampler=sampler())
    assert drawn(loader, 4) == one == drawn(loader, 4)
    assert {n for batch in one for n in batch} <= {0, 1, 2}
    assert {int(x) for x in as_client_data(loader, "client 0").take(torch.arange(2))[0]} <= {
        0,
        1,
        2,
    }


def test_a_batch_sampler_is_honored() -> None:
    pairs = BatchSampler(SequentialSampler(range(6)), 3, drop_last=False)
    loader = DataLoader(NUMBERS, batch_sampler=pairs)
    assert drawn(loader, 3) == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]

    class Ends:
        def __iter__(self) -> Iterator[list[int]]:
            return iter([[0, 9], [9, 0]])

        def __len__(self) -> int:
            return 2

    loader = DataLoader(NUMBERS, batch_sampler=Ends())  # type: ignore[arg-type]
    assert drawn(loader, 3) == [[0, 9], [9, 0], [0, 9]]
    assert steps_per_epoch(as_client_data(loader, "client 0"), 32) == 2


class Noisy(Dataset[Any]):
    """A Dataset that draws, as random crops do."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return torch.randn(3), index % 2


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(NUMBERS)


def fit(clients: Any, **settings: Any) -> torch.Tensor:
    torch.manual_seed(0)
    result = fedspan.fit(
        torch.nn.Linear(3, 2),
        clients,
        method=FedAvg(lr=0.1, local_steps=2),
        rounds=2,
        progress=False,
        **settings,
    )
    weight: torch.Tensor = result.weights[0]["weight"]
    return weight


def test_what_a_dataset_draws_repeats() -> None:
    weights = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        weights.append(fit([DataLoader(Noisy(), batch_size=4, shuffle=True)] * 2))
    assert torch.equal(*weights)


def test_collate_fn_is_honored() -> None:
    def doubled(rows: list[Any]) -> Any:
        return torch.stack([2 * x for x, _ in rows]), torch.tensor([y for _, y in rows])

    x, y = torch.randn(12, 3), torch.arange(12) % 2
    loader = DataLoader(TensorDataset(x, y), 4, shuffle=True, collate_fn=doubled)
    assert torch.equal(fit([loader]), fit([(2 * x, y)], batch_size=4))


def test_loaders_that_cannot_be_used_are_named() -> None:
    wrong = {
        "client 0 is a stream": DataLoader(Stream()),
        "`batch_size=None`": DataLoader(NUMBERS, batch_size=None),
        "leave out `drop_last=True`": DataLoader(NUMBERS, batch_size=11, drop_last=True),
    }
    for message, loader in wrong.items():
        with pytest.raises(DataError, match=message):
            fit([loader])
    with pytest.raises(
        SpecError, match=r"`batch_size` is 8, but the DataLoader of client 'a' has 4"
    ):
        fit({"a": DataLoader(Noisy(), batch_size=4)}, batch_size=8)
    with pytest.warns(UserWarning, match="`num_workers` of a DataLoader counts for nothing"):
        fit([DataLoader(Noisy(), batch_size=4, num_workers=2)])
