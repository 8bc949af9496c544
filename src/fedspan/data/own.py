"""Examples of your own in a spec: which file, which columns, whose rows, and which of them are for testing."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedspan.core import seeds
from fedspan.core.errors import DataError, SpecError, at_least, below_one, items, path_of
from fedspan.core.partition import Indices, Partition
from fedspan.core.task import Holdings
from fedspan.data import columns, features, images
from fedspan.data.columns import Array, Columns
from fedspan.data.datasets import Split
from fedspan.data.features import column_of, first_row, known
from fedspan.data.partitions.natural import Natural

TEST_SHARE = 0.2
MOST_PIXELS = 4096
Kind = Literal[
    "classes", "numbers", "texts"
]  # classes of features, numbers of features, classes of texts


@dataclass(frozen=True, kw_only=True)
class OwnData:
    """A file of examples, or a directory with a sub-directory of images per class.

    The test set is the file `test_path`, the rows that `test_column` marks, or a share of each client's rows.
    """

    path: str  # .npz, .safetensors, .csv, .tsv, .jsonl, .parquet, or a directory; relative to the spec file
    target: str | None = (
        None  # column to predict; by default `y` in .npz and .safetensors, `label` of texts
    )
    features: tuple[str, ...] | None = (
        None  # columns of inputs; by default all other columns of numbers, or `text`
    )
    images: str | None = None  # column with the paths of images, which are the inputs
    image_size: int | None = (
        None  # images are made this many pixels wide and high; by default they keep their size
    )
    client: str | None = None  # column that says whose a row is, for the partition `natural`
    standardize: Literal["pooled", "none"] = (
        "pooled"  # mean 0, deviation 1 over all clients' training rows; or not
    )
    test_path: str | None = None  # file or directory of the test set
    test_column: str | None = (
        None  # column that says "train" or "test", or 1 for test and 0 for training
    )
    test_share: float | None = (
        None  # of each client's rows, drawn by the seed; 0.2 by default, 0: no test set
    )

    def __post_init__(self) -> None:
        for name in ("path", "test_path"):
            if getattr(self, name) is not None or name == "path":
                path_of(name, getattr(self, name))
        given = [
            name
            for name in ("test_path", "test_column", "test_share")
            if getattr(self, name) is not None
        ]
        if len(given) > 1:
            raise SpecError(
                f"`{given[0]}` and `{given[1]}` both say what the test set is; give one of them"
            )
        if self.test_share is not None:
            below_one("test_share", self.test_share)
        if self.image_size is not None:
            at_least("image_size", self.image_size, 1)
            if self.image_size > MOST_PIXELS:
                raise SpecError(
                    f"`image_size` must be at most {MOST_PIXELS} pixels, got {self.image_size}"
                )
        if self.features is not None:
            object.__setattr__(self, "features", items("features", self.features))
            features.check(self.features, self.target)

    def decisions(self) -> dict[str, Any]:
        """What decides the numbers: a hash of the files in place of their paths."""
        fields = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in ("path", "test_path")
        }
        plain = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in fields.items()
        }
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        return {k: v for k, v in plain.items() if fields[k] != defaults[k]} | {
            "digest": self.digest()
        }

    def digest(self) -> str:
        """A hash of the files, by which changed data is noticed."""
        paths = [Path(path) for path in (self.path, self.test_path) if path is not None]
        return "-".join(part for path in paths for part in self._digests(path))

    def _digests(self, path: Path) -> list[str]:
        own = columns.digest(path)
        if self.images is None or not path.is_file():
            return [own]
        return [own, columns.digest_of(path.parent, _listed(path, own, self.images))]

    def divide(self, kind: Kind, partition: Partition, seed: int) -> Division:
        """Reads the files and divides their examples among clients."""
        return _divide(_load(self, self.digest(), kind), self, partition, seed)


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
        if not self.classes:
            return Holdings(np.array([[len(part)] for part in self.parts]), self.clients)
        counts = [
            np.bincount(self.train.y[part], minlength=len(self.classes)) for part in self.parts
        ]
        return Holdings(np.stack(counts), self.clients, self.classes)


@dataclass(frozen=True, eq=False)
class _Examples:
    x: Array
    y: Array
    owner: Array | None
    test: npt.NDArray[np.bool_] | None  # None: a share is drawn
    classes: list[str]


def _divide(found: _Examples, own: OwnData, partition: Partition, seed: int) -> Division:
    pool = np.arange(len(found.y)) if found.test is None else np.flatnonzero(~found.test)
    natural = isinstance(partition, Natural)
    if natural and found.owner is None:
        raise SpecError(
            "`task.data.client` is missing, the column that says whose a row is; or use another `partition`"
        )
    if not natural and not found.classes and type(partition).__name__ in ("Dirichlet", "Classes"):
        raise SpecError(
            "`task.partition` divides classes, but the target is a number; use iid, quantity or natural"
        )
    owner = None if found.owner is None else found.owner[pool]
    if natural and partition.clients is None:
        lost = sorted({*map(str, found.owner)} - {*map(str, owner)})  # type: ignore[arg-type]
        if lost:
            raise DataError(
                f"`task.data`: client {lost[0]!r} has no training rows, only rows of the test set"
            )
    parts = [pool[part] for part in partition.split(found.y[pool], seed, owner)]
    test = np.flatnonzero(found.test) if found.test is not None else np.empty(0, np.int64)
    if found.test is None:
        share = TEST_SHARE if own.test_share is None else own.test_share
        parts, test = _held_out(parts, share, seed)
    train = np.setdiff1d(pool, test)
    names = [str(i) for i in range(len(parts))]
    if natural:
        names = [str(found.owner[part[0]]) for part in parts]  # type: ignore[index]
    held = Split(found.x[test], found.y[test]) if len(test) else None
    places = [np.searchsorted(train, part) for part in parts]
    return Division(Split(found.x[train], found.y[train]), held, places, names, found.classes)


def _held_out(parts: list[Indices], share: float, seed: int) -> tuple[list[Indices], Indices]:
    """Takes a share of each client's rows for testing; at least one row stays."""
    kept, out = [], []
    for client, part in enumerate(parts):
        rng = np.random.Generator(np.random.PCG64(seeds.key(seed, "test share", client)))
        count = min(round(share * len(part)), len(part) - 1)
        drawn = rng.permutation(part)
        kept.append(np.sort(drawn[count:]))
        out.append(drawn[:count])
    return kept, np.sort(np.concatenate(out))


@functools.lru_cache(maxsize=2)
def _load(own: OwnData, _digest: str, kind: Kind) -> _Examples:
    """All rows, those of `test_path` last; the digest is there for the cache."""
    tables = [_table(own, Path(own.path), kind)]
    if own.test_path is not None:
        tables.append(_table(own, Path(own.test_path), kind))
    joined = (
        _joined([table[0] for table in tables], own),
        _joined([table[1] for table in tables], own),
    )
    y, classes = (_numbers(joined[1]), []) if kind == "numbers" else _classes(joined[1])
    owner, marked = tables[0][2], tables[0][3]
    if len(tables) > 1:
        sizes = [len(table[1]) for table in tables]
        marked = np.repeat([False, True], sizes)
        owner = None if owner is None else np.concatenate([owner, np.repeat(owner[:1], sizes[1])])
    return _Examples(joined[0], y, owner, marked, classes)


def _joined(arrays: list[Array], own: OwnData) -> Array:
    if len({array.shape[1:] for array in arrays}) > 1:
        shapes = " and ".join(str(array.shape[1:]) for array in arrays)
        raise DataError(
            f"`task.data`: {own.path!r} and {own.test_path!r} have examples of different shape, {shapes}"
        )
    return np.concatenate(arrays) if len(arrays) > 1 else arrays[0]


def _table(
    own: OwnData, path: Path, kind: Kind
) -> tuple[Array, Array, Array | None, npt.NDArray[np.bool_] | None]:
    """(inputs, raw targets, owners, test rows) of one file."""
    if path.is_dir():
        files, names = images.class_files(path)
        return images.read(files, own.image_size), np.array(names), None, None
    found, only_test = columns.read(path), own.test_path is not None and path == Path(own.test_path)
    target = own.target or _usual(found, "label" if kind == "texts" else "y")
    goal = column_of(found, target, "target", path)
    marks = (
        None if own.test_column is None else column_of(found, own.test_column, "test_column", path)
    )
    owner = (
        None if own.client is None or only_test else column_of(found, own.client, "client", path)
    )
    if owner is not None and (empty := np.isin(owner.astype(str), ("", "nan"))).any():
        raise DataError(
            f"`task.data.client`: {own.client!r} is empty in row {first_row(empty)}; fill it or drop the row"
        )
    x = _inputs(found, own, target, path, kind)
    for name, array in ((own.client, owner), (own.test_column, marks), ("the features", x)):
        if array is not None and len(array) != len(goal):
            raise DataError(
                f"`task.data`: {name!r} has {len(array)} rows in {str(path)!r}, but {target!r} has {len(goal)}; "
                "name the columns to use in `features`"
            )
    return x, goal, owner, None if marks is None else _marked(marks, own)


def _usual(found: Columns, name: str) -> str:
    if name in found:
        return name
    raise SpecError(
        f"`task.data.target` is missing, the column to predict; there are {known(found)}"
    )


@functools.lru_cache(maxsize=4)
def _listed(path: Path, _digest: str, name: str) -> list[Path]:
    return _places(columns.read(path), name, path)


def _places(found: Columns, name: str, path: Path) -> list[Path]:
    """The images that a column lists."""
    return [path.parent / str(file) for file in column_of(found, name, "images", path)]


def _inputs(found: Columns, own: OwnData, target: str, path: Path, kind: Kind) -> Array:
    if own.images is not None:
        return images.read(_places(found, own.images, path), own.image_size)
    if own.features is not None:
        features.check(own.features, target)
    if kind == "texts":
        if own.features is not None and len(own.features) > 1:
            raise SpecError(
                f"`task.data.features` must be one column of texts, got {', '.join(own.features)}"
            )
        name = own.features[0] if own.features else "text"
        texts = column_of(found, name, "features", path)
        if texts.dtype.kind != "U":
            raise DataError(
                f"`task.data.features`: {name!r} of {str(path)!r} has numbers, not texts"
            )
        return texts
    return features.stacked(found, own.features, {target, own.client, own.test_column}, path)


def _classes(goal: Array) -> tuple[Array, list[str]]:
    if goal.ndim != 1 or goal.dtype.kind == "f":
        got = "floating-point numbers" if goal.ndim == 1 else f"an array of shape {goal.shape}"
        raise DataError(
            f"`task.data.target`: classes are whole numbers or names, got {got}; use the task 'tabular_regression' "
            "to predict numbers"
        )
    names, y = np.unique(goal, return_inverse=True)
    if names.dtype.kind in "US" and "" in names:
        raise DataError(
            f"`task.data.target` is empty in row {first_row(goal == '')}; fill it or drop the row"
        )
    if len(names) < 2:
        raise DataError(f"`task.data.target` has one class only, {str(names[0])!r}")
    return y.astype(np.int64), [str(name) for name in names]


def _numbers(goal: Array) -> Array:
    if goal.dtype.kind not in "biuf":
        raise DataError(
            f"`task.data.target` is text ({str(goal.flat[0])!r} in row 1); use the task 'classification'"
        )
    y = goal.reshape(len(goal), -1).astype(np.float64)
    if not np.isfinite(y).all():
        raise DataError(
            f"`task.data.target` has no number in row {first_row(~np.isfinite(y).all(1))}; drop the row"
        )
    return y


def _marked(marks: Array, own: OwnData) -> npt.NDArray[np.bool_]:
    words = np.char.lower(marks.astype(str))
    test = np.isin(words, ("test", "true", "1", "1.0"))
    wrong = ~test & ~np.isin(words, ("train", "training", "false", "0", "0.0"))
    if wrong.any():
        raise DataError(
            f"`task.data.test_column`: {own.test_column!r} is {str(marks[wrong][0])!r} in row {first_row(wrong)}; "
            "write 'train' or 'test', or 0 and 1 for test"
        )
    return test
