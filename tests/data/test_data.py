"""Data sets by name and ways of cutting them into clients."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspan.core.errors import DataError, SpecError
from fedspan.data import IID, Classes, Dirichlet, Natural, Partition, Quantity, sets
from fedspan.data import datasets as _datasets


def have(name: str) -> Any:
    """The full data set, for slow tests."""
    if not sets.find(name).here():
        pytest.skip(f"{name} is not here; {sets.find(name).command}")
    return _datasets.load(name)


@settings(max_examples=40, deadline=None)
@given(
    clients=st.integers(1, 12),
    seed=st.integers(0, 10**6),
    alpha=st.floats(0.05, 10),
    size=st.integers(60, 300),
)
def test_every_example_goes_to_exactly_one_client(
    clients: int, seed: int, alpha: float, size: int
) -> None:
    labels = np.random.default_rng(seed).integers(0, 7, size)
    cuts = [
        IID(clients=clients).split(labels, seed),
        Dirichlet(clients=clients, alpha=alpha).split(labels, seed),
        Quantity(clients=clients, alpha=alpha).split(labels, seed),
        Natural().split(labels, owners=labels % clients)
        if len(set(labels % clients)) == clients
        else None,
    ]
    for parts in cuts:
        if parts is not None:
            assert len(parts) == clients
            assert min(len(part) for part in parts) >= 1
            assert sorted(np.concatenate(parts).tolist()) == list(range(size))


@settings(max_examples=40, deadline=None)
@given(clients=st.integers(1, 12), seed=st.integers(0, 10**6), per_client=st.integers(1, 7))
def test_a_client_holds_as_many_classes_as_asked(clients: int, seed: int, per_client: int) -> None:
    labels = np.repeat(np.arange(7), 40)
    parts = Classes(clients=clients, classes_per_client=per_client).split(labels, seed)
    assert all(len(set(labels[part])) == per_client for part in parts)
    together = np.concatenate(parts)
    assert len(set(together.tolist())) == len(together)


def test_four_clients_of_25_classes_share_nothing() -> None:
    """The split of the CIFAR-100 benchmark."""
    labels = np.repeat(np.arange(100), 5)
    parts = Classes(clients=4, classes_per_client=25).split(labels)
    assert [len(part) for part in parts] == [125] * 4
    assert len(set(np.concatenate(parts).tolist())) == 500


KNOWN: list[tuple[Partition, list[list[int]]]] = [
    (IID(clients=4), [[5, 14, 15, 16, 17], [2, 4, 6, 12, 13], [7, 8, 9, 10], [0, 1, 3, 11]]),
    (
        Dirichlet(clients=4, alpha=0.3),
        [[0, 3, 9, 10, 12, 13, 14, 15], [1], [7, 11, 17], [2, 4, 5, 6, 8, 16]],
    ),
    (
        Quantity(clients=4, alpha=0.3),
        [[4, 5, 9, 11, 12, 13, 16, 17], [14], [7], [0, 1, 2, 3, 6, 8, 10, 15]],
    ),
    (Classes(clients=4), [[2, 3, 5, 6, 17], [1, 8, 11, 14, 16], [0, 4, 9, 10], [7, 12, 13, 15]]),
]


@pytest.mark.parametrize(("partition", "parts"), KNOWN, ids=lambda value: type(value).__name__)
def test_a_seed_gives_the_same_clients_in_every_version(
    partition: Partition, parts: list[list[int]]
) -> None:
    assert [part.tolist() for part in partition.split(np.arange(18) % 3, 7)] == parts


def test_natural_clients_are_those_with_the_most_examples() -> None:
    owners = np.array([2, 0, 1, 1, 2, 0, 0, 0])
    found = Natural(clients=2).split(np.zeros(8, np.int64), owners=owners)
    assert [part.tolist() for part in found] == [[1, 5, 6, 7], [2, 3]]


def test_small_alpha_means_few_classes() -> None:
    labels = np.repeat(np.arange(10), 200)

    def spread(alpha: float) -> float:
        parts = Dirichlet(clients=10, alpha=alpha).split(labels, 1)
        return float(
            np.mean([(np.bincount(labels[p], minlength=10) / len(p)).max() for p in parts])
        )

    assert spread(0.1) > 0.5 > spread(10)


def test_mistakes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match="`alpha` must be a positive number, got 0"):
        Dirichlet(clients=2, alpha=0)
    with pytest.raises(SpecError, match="`clients` must be a whole number of at least 1, got 0"):
        IID(clients=0)
    with pytest.raises(SpecError, match="`clients` is missing"):
        IID().split(np.arange(3))
    with pytest.raises(SpecError, match="only 3 examples"):
        IID(clients=4).split(np.arange(3))
    with pytest.raises(SpecError, match="from 1 to the 3 classes"):
        Classes(clients=2, classes_per_client=4).split(np.arange(3))
    with pytest.raises(SpecError, match="does not say who"):
        Natural().split(np.arange(3))
    with pytest.raises(SpecError, match="has 2 natural clients"):
        Natural(clients=3).split(np.arange(3), owners=np.array([0, 1, 1]))
    with pytest.raises(SpecError, match=r"`data set` must be one of cifar10, .* got 'cifar'"):
        _datasets.load("cifar")
    monkeypatch.setenv("FEDSPAN_DATA", "no/such/place")
    with pytest.raises(DataError, match="run `fedspan data get mnist` first"):
        _datasets.load("mnist")
    with pytest.raises(
        DataError, match=r"'cifar100_mini' is not here; run `fedspan data get cifar100` first"
    ):
        _datasets.load("cifar100_mini")


@pytest.mark.slow
def test_mnist_with_its_writers() -> None:
    train, test = have("mnist")
    assert (train.x.shape, test.x.shape) == ((60000, 28, 28), (10000, 28, 28))
    parts = Natural().split(train.y, owners=train.owner)
    assert len(parts) == 539
    assert sum(map(len, parts)) == 60000


@pytest.mark.slow
def test_cifar_comes_out_bit_for_bit() -> None:
    train, test = have("cifar100")
    known = (
        "4e457917601a66aed021f5fa37957b56c6319557c0a8ed5484de3c390af45430",
        "4cb8e5d9309da489bf6b19cc10cd96c3ae6f8daf225380b605aaee4c0d6aee19",
    )
    assert tuple(hashlib.sha256(part.x.tobytes()).hexdigest() for part in (train, test)) == known
    few, _ = have("cifar100_mini")
    first = np.sort(np.concatenate([np.flatnonzero(train.y == c)[:50] for c in range(100)]))
    assert np.array_equal(few.y, train.y[first])
    assert np.array_equal(few.x, train.x[first])


def test_digits() -> None:
    train, test = _datasets.load("digits")
    assert (len(train.x), len(test.x)) == (1500, 297)
    assert train.x.max() == 255
