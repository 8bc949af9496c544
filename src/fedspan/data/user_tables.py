"""Examples of your own in a spec: which file, which columns, whose rows, and which of them are for testing.

A file is read as named columns (`data.columns`). `_features` makes inputs of them, `_targets` what is predicted; then
rows are divided among clients.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from fedspan.core.errors import DataError, SpecError, at_least, at_most, below_one, items, path_of
from fedspan.core.partition import Indices, Partition
from fedspan.core.spec import PATHS
from fedspan.core.tables import describe
from fedspan.core.task import Holdings
from fedspan.data import columns
from fedspan.data.columns import Array, Columns, column_of, first_row
from fedspan.data.datasets import Split
from fedspan.data.partitions.classes import Classes
from fedspan.data.partitions.dirichlet import Dirichlet
from fedspan.data.partitions.natural import Natural
from fedspan.data.schema import Features, blanked
from fedspan.data.schema import describe as describe_columns
from fedspan.data.table_data import (
    TableData,
    check_classes,
    check_features,
    class_names,
    classes_of,
    files_of,
    filled,
    is_pattern,
    numbers_of,
    read_clients,
    rows_of,
    shared_out,
)

TARGET = "`task.data.target`"
MOST_PIXELS = 4096
Kind = Literal[
    "classes", "numbers", "texts"
]  # classes of features, numbers of features, classes of texts


@dataclass(frozen=True, kw_only=True)
class OwnData(Features):
    """A file of examples, a file for each client, or a directory with a sub-directory of images per class.

    The test set is the file `test_path`, the rows that `test_column` marks, or a share of each client's rows.
    """

    path: str  # .npz, .safetensors, .csv, .tsv, .jsonl, .parquet, a pattern of such files, or a directory
    target: str | None = None  # column to predict; by default `y` of arrays, `label` of texts
    images: str | None = None  # column with the paths of images, which are the inputs
    image_size: int | None = None  # pixels that images are made wide and high; none: as they are
    client: str | None = None  # column that says whose a row is, for the partition `natural`
    weight: str | None = None  # column with the weights of rows in training
    own_file: str | None = None  # of a client on its own machine: the file with its rows
    own_name: str | None = None  # and its name, if it has one
    test_path: str | None = None  # file or directory of the test set
    test_column: str | None = None  # column that says "train" or "test", or 0 or 1 for test
    test_share: float | None = None  # of each client's rows; 0.2 by default, 0: no test set

    def __post_init__(self) -> None:
        path_of("path", self.path)
        if self.test_path is not None:
            path_of("test_path", self.test_path)
        tests = ("test_path", "test_column", "test_share")
        given = [name for name in tests if getattr(self, name) is not None]
        if len(given) > 1:
            raise SpecError(
                f"`{given[0]}` and `{given[1]}` both say what the test set is; give one of them"
            )
        if self.test_share is not None:
            below_one("test_share", self.test_share)
        if self.image_size is not None:
            at_least("image_size", self.image_size, 1)
            at_most("image_size", self.image_size, MOST_PIXELS)
        if self.features is not None:
            object.__setattr__(self, "features", items("features", self.features))
            check_features(self.features, self.target)
        if not self.tabular and self.standardize == "client":
            raise SpecError('`standardize` "client" is for tables; use "pooled" or "none"')
        if not self.tabular and self.weight is not None:
            raise SpecError("`weight` is for tables, and these examples are none; leave it out")

    @property
    def tabular(self) -> bool:
        """Whether the files are tables, whose columns have a schema."""
        name = self.path.removesuffix(".gz")
        return self.images is None and Path(name).suffix in (".csv", ".tsv", ".jsonl", ".parquet")

    def decisions(self) -> dict[str, Any]:
        """What decides the numbers: a hash of the files in place of their paths."""
        given = describe(self, changed=True) | {"digest": self.digest()}
        return {key: value for key, value in given.items() if key not in (*PATHS, "own_name")}

    def digest(self) -> str:
        """A hash of the files, by which changed data is noticed."""
        paths: list[str | Path] = [self.path]
        if is_pattern(self.path):  # on a client's own machine the other files are not there
            here = self.own_file is None
            paths = [*files_of(self.path).values()] if here else []
        if self.test_path is not None:
            paths.append(self.test_path)
        found = []
        for path in map(Path, paths):
            found.append(columns.digest(path))
            if self.images is not None and path.is_file():
                listed = _listed(columns.read(path), self.images, path)
                found.append(columns.digest(path.parent, listed))
        return "-".join(found)

    def divide(self, kind: Kind, partition: Partition, seed: int) -> Division:
        """Read the files and divide their examples among clients."""
        x, y, owner, marked, classes = _load(self, self.digest(), kind)
        parts, held, rest, names = self._dealt(y, owner, marked, kind, partition, seed)
        test = np.sort(np.concatenate([*held, rest]))
        train = np.sort(np.concatenate(parts))
        return Division(
            Split(x[train], y[train]),
            Split(x[test], y[test]) if len(test) else None,
            [np.searchsorted(train, part) for part in parts],
            names,
            classes,
        )

    def tables(self, kind: Kind, partition: Partition, seed: int, dtype: torch.dtype) -> TableData:
        """Read tables, divide their rows among clients, and agree on features."""
        if not is_pattern(self.path):
            files = {"": columns.read(Path(self.path))}
        elif isinstance(partition, Natural) and self.client is None:
            files = read_clients(self.path)
        else:
            raise SpecError(
                "`task.data.path` names a file for each client; leave out `partition` and `client`"
            )
        goals, owners, marks = {}, [], []
        files = {name: blanked(found, self.gaps, self.others[1:]) for name, found in files.items()}
        for name, found in files.items():
            path = Path(name or self.path)
            # refused here with the row of the file
            describe_columns(found, self, self.others, repr(str(path)))
            goal, owner, marked = self.said(found, path)
            goals[f"{TARGET} of {name!r}" if name else TARGET] = goal
            owners.append(np.repeat(name, len(goal)) if name else owner)
            marks.append(marked)
        classes = classes_of(goals, kind == "numbers")
        starts = dict(zip(files, np.cumsum([0, *map(len, goals.values())]), strict=False))
        y, owner, marked = (
            None if one[0] is None else np.concatenate(one)
            for one in ([*goals.values()], owners, marks)
        )
        parts, held, rest, who = self._dealt(y, owner, marked, kind, partition, seed)

        def taken(client: str, rows: Indices) -> Columns:
            file = client if client in files else ""
            return rows_of(files[file], rows - starts[file])

        pooled = taken("", rest) if len(rest) and "" in files else None
        if self.test_path is not None:
            pooled = blanked(columns.read(Path(self.test_path)), self.gaps, self.others[1:])
        return TableData(
            {name: taken(name, part) for name, part in zip(who, parts, strict=True)},
            {name: taken(name, part) for name, part in zip(who, held, strict=True) if len(part)},
            self.others[0],
            self,
            self.others,
            classes=classes,
            weight=self.weight,
            pooled=pooled,
            dtype=dtype,
        )

    def said(self, found: Columns, path: Path, target: str = "y") -> tuple[Array, Any, Any]:
        """Return the targets of a file, whose its rows are, and which are for tests; None for what it does not say.

        Args:
            found: The file's columns.
            path: The file, for errors.
            target: The column to predict, if none is named.
        """
        if self.target is None and target not in found:
            raise SpecError(
                f"{TARGET} is missing, the column to predict; there are {', '.join(found)}"
            )
        goal = _column(found, self.target or target, "target", path)
        owner = marked = None
        if self.client is not None and path != Path(self.test_path or ""):
            owner = _column(found, self.client, "client", path)
            names = owner.astype(str)
            filled(np.where(names == "nan", "", names), f"`task.data.client`: {self.client!r}")
        if self.test_column is not None:
            marks = _column(found, self.test_column, "test_column", path).astype(str)
            words = np.char.lower(marks)
            marked = np.isin(words, ("test", "true", "1", "1.0"))
            wrong = ~marked & ~np.isin(words, ("train", "training", "false", "0", "0.0"))
            if wrong.any():
                row, remedy = first_row(wrong), "write 'train' or 'test', or 0 and 1 for test"
                raise DataError(
                    f"`task.data.test_column`: {self.test_column!r} is {str(marks[row - 1])!r} in row {row}; {remedy}",
                    f"`task.data.test_column`: {self.test_column!r} is neither in row {row}; {remedy}",
                )
        return goal, owner, marked

    def own_rows(self, client: int, seed: int, kind: Kind = "classes") -> tuple[Columns, Columns]:
        """Return the rows of a client on its own machine, for training and for tests."""
        if self.own_file is None:
            raise SpecError(
                "the node's config needs data, the file with this client's rows: data=\"/srv/ward.csv\""
            )
        found = blanked(columns.read(Path(self.own_file)), self.gaps, self.others[1:])
        describe_columns(found, self, self.others, repr(self.own_file))
        goal, _, marked = self.said(found, Path(self.own_file))
        check = numbers_of if kind == "numbers" else class_names
        check(goal, TARGET)  # refused here with the row of the file
        name = self.own_name or str(client)
        train, test = self._shared(np.arange(len(goal)), marked, seed, name)
        return rows_of(found, train), rows_of(found, test)

    @property
    def others(self) -> list[str]:
        """The columns that are no features."""
        return [self.target or "y", *filter(None, (self.client, self.test_column, self.weight))]

    def _shared(self, rows: Indices, marked: Any, seed: int, client: str) -> tuple[Array, Array]:
        """Return a client's rows for training and for tests: those that are marked, or a share."""
        if marked is not None:
            return rows[~marked[rows]], rows[marked[rows]]
        share = self.test_share
        if share is None:
            share = 0.2 if self.test_path is None else 0.0
        return shared_out(rows, share, seed, client)

    def _dealt(
        self, y: Any, owner: Any, marked: Any, kind: Kind, partition: Partition, seed: int
    ) -> tuple[list[Indices], list[Indices], Indices, list[str]]:
        """Return each client's rows for training and for tests, the test rows of no client, and the clients' names."""
        natural = isinstance(partition, Natural)
        if natural and owner is None:
            raise SpecError(
                "`task.data.client` is missing, the column that says whose a row is; or use another `partition`"
            )
        if kind == "numbers" and isinstance(partition, Dirichlet | Classes):
            raise SpecError(
                "`task.partition` divides classes, but the target is a number; use iid, quantity or natural"
            )
        tests = np.zeros(len(y), bool) if marked is None else marked
        pool, rest = np.flatnonzero(~tests), np.flatnonzero(tests)
        owner = np.zeros(len(y)) if owner is None else owner
        parts = [pool[part] for part in partition.split(y[pool], seed, owner[pool])]
        whose = owner.astype(str)
        lost = np.setdiff1d(whose, whose[pool])
        if natural and partition.clients is None and len(lost):
            raise DataError(
                f"`task.data`: client {str(lost[0])!r} has no training rows, only rows of the test set"
            )
        names = [str(whose[part[0]] if natural else i) for i, part in enumerate(parts)]
        held = [rest[whose[rest] == name] if natural else rest[:0] for name in names]
        if marked is None:
            both = [
                self._shared(part, None, seed, name)
                for name, part in zip(names, parts, strict=True)
            ]
            parts, held = [train for train, _ in both], [test for _, test in both]
        return parts, held, np.setdiff1d(rest, np.concatenate(held)), names


@dataclass(frozen=True, eq=False)
class Division:
    """Examples, and which client has which."""

    train: Split
    test: Split | None
    parts: list[Indices]  # of each client, in `train`
    clients: list[str]  # their names
    classes: list[str]  # names of the classes; none of numbers

    def holdings(self) -> Holdings:
        """How many examples of each class every client has."""
        kinds = len(self.classes)
        counts = [
            np.bincount(self.train.y[part], minlength=kinds) if kinds else [len(part)]
            for part in self.parts
        ]
        return Holdings(np.stack(counts), self.clients, self.classes)


# --- Files as inputs, targets, owners and test rows ---


@functools.lru_cache(maxsize=2)
def _load(own: OwnData, _digest: str, kind: Kind) -> tuple[Array, Array, Any, Any, list[str]]:
    """(inputs, targets, owners, test rows, classes) of all files, `test_path` last; the digest is for the cache.

    Test rows are None where a share of each client's is to be drawn.
    """
    x, goal, owner, marked = _table(own, own.path, kind)
    if own.test_path is not None:
        test_x, test_goal, *_ = _table(own, own.test_path, kind)
        marked = np.repeat([False, True], [len(goal), len(test_goal)])
        owner = None if owner is None else np.append(owner, owner[:1].repeat(len(test_goal)))
        shapes = x.shape[1:], test_x.shape[1:]
        try:
            x, goal = np.concatenate([x, test_x]), np.concatenate([goal, test_goal])
        except ValueError:
            raise DataError(
                f"`task.data`: {own.path!r} and {own.test_path!r} have examples of different shapes, {shapes}"
            ) from None
    if kind == "numbers":
        return x, numbers_of(goal, TARGET), owner, marked, []
    check_classes(goal, TARGET)
    names, y = np.unique(goal, return_inverse=True)
    filled(goal.astype(str), TARGET)
    if len(names) < 2:
        raise DataError(f"{TARGET} has one class only, {str(names[0])!r}")
    return x, y.astype(np.int64), owner, marked, [str(name) for name in names]


def _table(own: OwnData, place: str, kind: Kind) -> tuple[Array, Array, Any, Any]:
    """(inputs, raw targets, owners, test rows) of one file."""
    path = Path(place)
    if path.is_dir():
        files, names = columns.class_files(path)
        return columns.images(files, own.image_size), np.array(names), None, None
    found = columns.read(path)
    target = own.target or ("label" if kind == "texts" else "y")
    goal, owner, marked = own.said(found, path, target)
    x = _features(found, own, target, path, kind)
    for name, array in ((own.client, owner), (own.test_column, marked), ("the features", x)):
        if array is not None and len(array) != len(goal):
            raise DataError(
                f"`task.data`: {name!r} has {len(array)} rows in {str(path)!r}, but {target!r} has {len(goal)}; "
                "name the columns to use in `features`"
            )
    return x, goal, owner, marked


def _listed(found: Columns, name: str, path: Path) -> list[Path]:
    """The images that a column of a file lists."""
    return [path.parent / str(file) for file in _column(found, name, "images", path)]


# --- Columns as features ---


def _features(found: Columns, own: OwnData, target: str, path: Path, kind: Kind) -> Array:
    """The inputs: images that a column lists, one column of texts, or columns of numbers side by side."""
    if own.images is not None:
        return columns.images(_listed(found, own.images, path), own.image_size)
    check_features(own.features, target)
    if kind == "texts":
        name, *more = own.features or ("text",)
        if more:
            raise SpecError(
                f"`task.data.features` must be one column of texts, got {name}, {', '.join(more)}"
            )
        texts = _column(found, name, "features", path)
        if texts.dtype.kind != "U":
            raise DataError(
                f"`task.data.features`: {name!r} of {str(path)!r} has numbers, not texts"
            )
        return texts
    others = {target, own.client, own.test_column}
    numbers = [name for name, one in found.items() if one.dtype.kind in "biuf"]
    names = own.features or [name for name in numbers if name not in others]
    parts = {name: _column(found, name, "features", path) for name in names}
    if not parts:
        raise DataError(
            f"`task.data`: {str(path)!r} has no column of numbers besides the target; it has {', '.join(found)}"
        )
    checked = [
        numbers_of(part, f"`task.data.features`: {name!r} of {str(path)!r}")
        for name, part in parts.items()
    ]
    if len(parts) == 1 and parts[names[0]].ndim > 1:
        return parts[names[0]]  # such as images
    if len({len(part) for part in checked}) > 1 or any(part.ndim > 2 for part in parts.values()):
        shapes = ", ".join(f"{name!r} {part.shape}" for name, part in parts.items())
        raise DataError(
            f"`task.data.features` do not fit together in {str(path)!r}: {shapes}; name those to use"
        )
    return np.concatenate(checked, 1)


def _column(found: Columns, name: str, key: str, path: Path) -> Array:
    """The column that `task.data.<key>` names."""
    who = f"`task.data.{key}`: {str(path)!r}"
    column = column_of(found, name, who, f"it has {', '.join(found)}")
    if column.ndim == 0 or not column.size:
        raise DataError(
            f"{who} has {name!r} of shape {column.shape}; a column has one row per example, name the columns to use"
        )
    if column.dtype.kind == "O" or (key in ("client", "test_column", "images") and column.ndim > 1):
        raise DataError(
            f"{who} has lists or tables in {name!r}; name a column with one value per row"
        )
    return column
