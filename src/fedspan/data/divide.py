"""Dividing examples among clients, in one call: the partitions of a spec as functions of labels.

Each function gives one array of example numbers per client, in ascending order. They are the same numbers that a spec
with the partition of this name and the same seed gives its clients.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import numpy.typing as npt

from fedspan.core.errors import DataError, SpecError
from fedspan.core.partition import Indices, Partition
from fedspan.data.partitions.classes import Classes
from fedspan.data.partitions.dirichlet import Dirichlet
from fedspan.data.partitions.iid import IID
from fedspan.data.partitions.natural import Natural
from fedspan.data.partitions.quantity import Quantity

Labels = npt.ArrayLike  # an array, a list or a CPU tensor with one entry per example


def iid(labels: Labels, clients: int = 20, *, seed: int = 0) -> list[Indices]:
    """Divides examples into equal random shares.

    Args:
        labels: One entry per example; only their number matters.
        clients: Number of clients.
        seed: Decides the draw.

    Returns:
        The example numbers of each client.
    """
    return _parts(IID(clients=clients), labels, seed)


def dirichlet(
    labels: Labels, clients: int = 20, alpha: float = 0.5, *, seed: int = 0
) -> list[Indices]:
    """Divides each class in Dirichlet(α) proportions (Hsu et al. 2019).

    Args:
        labels: The class of each example.
        clients: Number of clients.
        alpha: α: the smaller, the fewer classes per client.
        seed: Decides the draw.

    Returns:
        The example numbers of each client. Every client has at least one.
    """
    return _parts(Dirichlet(clients=clients, alpha=alpha), labels, seed)


def classes(
    labels: Labels, clients: int = 20, classes_per_client: int = 2, *, seed: int = 0
) -> list[Indices]:
    """Gives each client the same number of classes; the clients that have a class share it equally.

    Args:
        labels: The class of each example.
        clients: Number of clients.
        classes_per_client: How many classes each client has.
        seed: Decides the draw.

    Returns:
        The example numbers of each client. A class that no client has is left out.
    """
    partition = Classes(clients=clients, classes_per_client=classes_per_client)
    return _parts(partition, labels, seed)


def quantity(
    labels: Labels, clients: int = 20, alpha: float = 0.5, *, seed: int = 0
) -> list[Indices]:
    """Divides examples into random shares of Dirichlet(α) sizes.

    Args:
        labels: One entry per example; only their number matters.
        clients: Number of clients.
        alpha: α: the smaller, the more unequal the sizes.
        seed: Decides the draw.

    Returns:
        The example numbers of each client. Every client has at least one.
    """
    return _parts(Quantity(clients=clients, alpha=alpha), labels, seed)


def natural(groups: Labels, clients: int | None = None) -> dict[str, Indices]:
    """Makes one client of each group of examples, such as each hospital, writer or device.

    Args:
        groups: The group of each example: a column of names or numbers.
        clients: Keep the groups with the most examples, this many; by default all.

    Returns:
        Name of the group → its example numbers, in the order of the sorted groups; `fedspan.fit` takes a dictionary
        of clients with the same names.
    """
    parts = _parts(Natural(clients=clients), groups, 0, "groups")
    names = np.asarray(groups)
    return {str(names[part[0]]): part for part in parts}


def _parts(
    partition: Partition, given: Labels, seed: object, name: str = "labels"
) -> list[Indices]:
    """The parts of a column, which is checked; `name` is what the caller calls it."""
    if isinstance(seed, bool | np.bool_) or not isinstance(seed, int | np.integer):
        raise SpecError(f"`seed` must be a whole number, got {seed!r}")
    column: Any = np.empty(())
    got = type(given).__name__
    with contextlib.suppress(ValueError, TypeError, RuntimeError):
        column = np.asarray(given)
        got = f"an array of shape {column.shape}"
    if column.ndim != 1 or not len(column):
        raise DataError(f"`{name}` must be a column with one entry per example, got {got}")
    entries: Any = ()  # those that name a class or a group
    if isinstance(partition, Dirichlet | Classes | Natural):
        # NumPy turns [1, "a"] into text
        entries = given if isinstance(given, list | tuple) else column.tolist()
    for place, entry in enumerate(entries):
        empty = entry is None or type(entry).__name__ in ("NAType", "NaTType") or entry != entry
        if empty or isinstance(entry, str) != isinstance(entries[0], str):
            raise SpecError(
                f"`{name}` begins with {entries[0]!r} and has {entry!r} in place {place}; use text or numbers for all, "
                "and leave out examples without"
            )
    return partition.split(column, int(seed), column)
