"""Who holds which examples: ways of cutting a data set into clients. Each gives a list of example numbers a client."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from fedspan.core import seeds
from fedspan.core.errors import SpecError

Numbers = npt.NDArray[np.int64]


def _rng(seed: int, purpose: str) -> np.random.Generator:
    """Cutting is done once, by whoever holds the data, and is no part of the protocol between parties."""
    return np.random.Generator(np.random.PCG64(seeds.key(seed, f"partition.{purpose}")))


def cut(how: str, labels: Numbers, clients: int, seed: int, alpha: float, classes_per_client: int) -> list[Numbers]:
    """A data set cut in one of the ways below that need labels alone."""
    if clients > len(labels):
        raise SpecError(f"`task.clients` is {clients}, but there are only {len(labels)} examples")
    ways: dict[str, Callable[[], list[Numbers]]] = {
        "iid": lambda: iid(labels, clients, seed),
        "dirichlet": lambda: dirichlet(labels, clients, seed, alpha),
        "classes": lambda: classes(labels, clients, seed, classes_per_client),
        "quantity": lambda: quantity(labels, clients, seed, alpha),
    }
    return ways[how]()


def some(labels: Numbers, classes: int | None, per_class: int | None) -> Numbers:
    """Numbers of the first examples of the first classes, in the order of the file; None: all of them."""
    names = np.unique(labels)
    if classes is not None and classes > len(names):
        raise SpecError(f"`task.classes` is {classes}, but the data set has {len(names)}")
    return np.sort(np.concatenate([np.flatnonzero(labels == c)[:per_class] for c in names[:classes]]))


def iid(labels: Numbers, clients: int, seed: int) -> list[Numbers]:
    """Equal random shares."""
    return [np.sort(part) for part in np.array_split(_rng(seed, "iid").permutation(len(labels)), clients)]


def dirichlet(labels: Numbers, clients: int, seed: int, alpha: float) -> list[Numbers]:
    """Each class is shared out in Dirichlet(α) proportions: small α, few classes a client (Hsu et al. 2019)."""
    rng = _rng(seed, "dirichlet")
    parts: list[list[Numbers]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        cuts = np.cumsum(rng.dirichlet(np.full(clients, alpha)))[:-1]
        for client, share in enumerate(np.split(members, (cuts * len(members)).astype(int))):
            parts[client].append(share)
    return _nobody_empty([np.sort(np.concatenate(part)) for part in parts], rng)


def classes(labels: Numbers, clients: int, seed: int, per_client: int) -> list[Numbers]:
    """Each client holds `per_client` classes; classes are dealt out evenly, and a class's holders share it equally."""
    rng, names = _rng(seed, "classes"), np.unique(labels)
    if not 1 <= per_client <= len(names):
        raise SpecError(f"`classes_per_client` must be from 1 to the {len(names)} classes, got {per_client}")
    deck: list[int] = []
    while len(deck) < clients * per_client:
        deck += rng.permutation(len(names)).tolist()
    hands: list[set[int]] = [set() for _ in range(clients)]
    for client in range(clients):
        for _ in range(per_client):
            place = next((i for i, card in enumerate(deck) if card not in hands[client]), None)
            hands[client].add(deck.pop(place) if place is not None else int(rng.integers(len(names))))
    parts: list[list[Numbers]] = [[] for _ in range(clients)]
    for number, name in enumerate(names):
        holders = [client for client in range(clients) if number in hands[client]]
        if holders:
            members = rng.permutation(np.flatnonzero(labels == name))
            for client, share in zip(holders, np.array_split(members, len(holders)), strict=True):
                parts[client].append(share)
    return [np.sort(np.concatenate(part)) for part in parts]


def quantity(labels: Numbers, clients: int, seed: int, alpha: float) -> list[Numbers]:
    """Random shares of Dirichlet(α) sizes: same distribution, different amounts."""
    rng = _rng(seed, "quantity")
    cuts = np.cumsum(rng.dirichlet(np.full(clients, alpha)))[:-1]
    parts = np.split(rng.permutation(len(labels)), (cuts * len(labels)).astype(int))
    return _nobody_empty([np.sort(part) for part in parts], rng)


def natural(owner: Numbers | None, clients: int | None) -> list[Numbers]:
    """By who made each example; the `clients` owners with the most examples, or all."""
    if owner is None:
        raise SpecError("this data set does not say who made which example; use another `partition` than 'natural'")
    names, counts = np.unique(owner, return_counts=True)
    order = names[np.argsort(-counts, kind="stable")][:clients]
    if clients is not None and clients > len(names):
        raise SpecError(f"`clients` is {clients}, but the data set has {len(names)} natural clients")
    return [np.flatnonzero(owner == name) for name in np.sort(order)]


def _nobody_empty(parts: list[Numbers], rng: np.random.Generator) -> list[Numbers]:
    """Move one example from the largest to each client that got none."""
    for client, part in enumerate(parts):
        if len(part) == 0:
            rich = max(range(len(parts)), key=lambda i: len(parts[i]))
            if len(parts[rich]) < 2:
                raise SpecError(f"there are fewer examples than the {len(parts)} clients")
            place = int(rng.integers(len(parts[rich])))
            parts[client] = parts[rich][place : place + 1]
            parts[rich] = np.delete(parts[rich], place)
    return parts
