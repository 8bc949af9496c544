"""Tables of several clients as training and test data: features by an agreed schema, targets, a test part of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedspan.core import seeds
from fedspan.core.errors import DataError, SpecError, below_one, did_you_mean, one_of, shown
from fedspan.data import columns
from fedspan.data.schema import Features, Schema, agreed, own_scale, texts

Array = npt.NDArray[Any]
Pair = tuple[Tensor, Tensor]


class TableData(Mapping[str, dict[str, Pair]]):
    """Clients' tables as tensors: a mapping of each client's name to its "train" and "test" part, for `fedspan.fit`.

    Attributes:
        schema: What the columns are, and the features that they become.
        classes: The names of the classes, or whole numbers; empty if the target is no class.
        width: How many features a row has: the inputs of a model.
        outputs: How many outputs a model needs: one per class, two classes included, or one number.
        test: The test parts of all clients together, scaled by the pooled mean and deviation; None without them.
        own: The schema of each client with its own scale, where `standardize` is "client".
    """

    def __init__(
        self,
        train: Mapping[str, Mapping[str, Array]],
        tests: Mapping[str, Mapping[str, Array]],
        target: str,
        asked: Features,
        *,
        numbers: bool,
        others: Sequence[str] = (),
        pooled: Mapping[str, Array] | None = None,
        schema: Schema | None = None,
        classes: Sequence[Any] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Agree on the features of the clients' training rows, unless there is a schema.

        Args:
            train: Each client's training rows, as columns by name.
            tests: Those of a client's rows that it is evaluated on.
            target: The column to predict.
            asked: How columns become features.
            numbers: Whether the target is a number, and no class.
            others: Columns that are no features, besides the target.
            pooled: Rows of no client that are for tests.
            schema: What clients on several machines have agreed on.
            classes: The same for the names of the classes.
            dtype: Of features and of targets that are numbers.
        """
        self.target, self.dtype = target, dtype
        self.schema = agreed(train, asked, (target, *others)) if schema is None else schema
        self.classes: list[Any] = list(classes or ())
        if not numbers and classes is None:
            given = {who: table[target] for who, table in (*train.items(), *tests.items())}
            self.classes = classes_of(given)
        self.own: dict[str, Schema] = {}
        if self.schema.standardize == "client":
            self.own = {who: own_scale(self.schema, table, who) for who, table in train.items()}
        self._parts: dict[str, dict[str, Pair]] = {}
        together: list[Pair] = []
        for who, table in train.items():
            own = self.own.get(who)
            self._parts[who] = {"train": self._pair(table, who, own)}
            if who in tests and len(tests[who][target]):
                self._parts[who]["test"] = self._pair(tests[who], who, own)
                together.append(self._pair(tests[who], who))
        if pooled is not None:
            together.append(self._pair(pooled, "the test set"))
        self.test: Pair | None = None
        if together:
            self.test = torch.cat([x for x, _ in together]), torch.cat([y for _, y in together])

    @property
    def width(self) -> int:
        """How many features a row has."""
        return self.schema.width

    @property
    def outputs(self) -> int:
        """How many outputs a model needs."""
        return len(self.classes) or 1

    def _pair(self, table: Mapping[str, Array], who: str, own: Schema | None = None) -> Pair:
        x = torch.from_numpy(self.schema.features(table, who, own)).to(self.dtype)
        goal = table[self.target]
        if not self.classes:
            return x, torch.from_numpy(_numbers(goal, self.target, who)).to(self.dtype)
        place = {str(name): number for number, name in enumerate(self.classes)}
        return x, torch.tensor([place[name] for name in texts(goal).tolist()])

    def __getitem__(self, who: str) -> dict[str, Pair]:
        return self._parts[who]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def tables(
    clients: Any,
    target: str,
    *,
    client: str | None = None,
    test_share: float = 0.2,
    seed: int = 0,
    kind: Literal["classes", "numbers"] | None = None,
    **features: Any,
) -> TableData:
    """Read the tables of several clients, agree on their features, and return data for `fedspan.fit`.

    Args:
        clients: A dictionary of each client's name to its table (a file, a DataFrame, an Arrow table or a dictionary of
            columns), a pattern of files such as `"hospitals/*.csv"`, or one table with the column `client`.
        target: The column to predict.
        client: In one table, the column that says whose a row is.
        test_share: The share of each client's rows that is kept for tests.
        seed: Decides which rows these are.
        kind: Whether the target is "classes" or "numbers"; by default numbers if it has fractions.
        features: Settings of `Features`, such as `ignore=["name"]` or `standardize="client"`.

    Returns:
        A mapping that `fit` takes as `clients`, with `schema`, `classes`, `width`, `outputs` and `test`.
    """
    below_one("test_share", test_share)
    found = read_clients(clients, client)
    for key in ("features", "ignore", "categories"):
        if isinstance(features.get(key), str):
            raise SpecError(f"`{key}` must be a list of columns, got {shown(features[key])}")
        if features.get(key) is not None:
            features[key] = tuple(features[key])
    try:
        asked = Features(**features)
    except TypeError:
        wrong = next(key for key in features if key not in Features.__dataclass_fields__)
        one_of("setting", wrong, sorted(Features.__dataclass_fields__))
        raise
    goals = [np.asarray(table[target]) for table in found.values() if target in table]
    if kind is None:
        fractions = [g for g in goals if g.dtype.kind == "f" and (g != np.round(g)).any()]
        kind = "numbers" if fractions else "classes"
    one_of("kind", kind, ("classes", "numbers"))
    kept, held = {}, {}
    for number, (who, table) in enumerate(found.items()):
        if target not in table:
            hint = did_you_mean(target, set(table))
            raise DataError(f"{who} has no column {target!r}{hint}; `target` names it")
        train, test = shared_out(np.arange(len(table[target])), test_share, seed, number)
        kept[who], held[who] = rows_of(table, train), rows_of(table, test)
    others = [] if client is None else [client]
    return TableData(kept, held, target, asked, numbers=kind == "numbers", others=others)


def shared_out(rows: Array, share: float, seed: int, client: int) -> tuple[Array, Array]:
    """Return a client's rows for training and a share of them for tests; at least one is for training."""
    rng = np.random.Generator(np.random.PCG64(seeds.key(seed, "test share", client)))
    count = min(round(share * len(rows)), len(rows) - 1)
    drawn = rng.permutation(rows)
    return np.sort(drawn[count:]), np.sort(drawn[:count])


def read_clients(clients: Any, client: str | None = None) -> dict[str, dict[str, Array]]:
    """Return each client's columns by name; see `tables`."""
    if isinstance(clients, Mapping) and clients and client is None:
        return {str(who): as_columns(table, str(who)) for who, table in clients.items()}
    if isinstance(clients, str | Path) and is_pattern(clients):
        return {who: columns.read(file) for who, file in files_of(clients).items()}
    if client is None:
        raise SpecError(
            "`client` is missing, the column of one table that says whose a row is; or give a dictionary of tables"
        )
    table = as_columns(clients, "the table")
    if client not in table:
        hint = did_you_mean(client, set(table))
        raise DataError(f"the table has no column {client!r}{hint}; `client` names it")
    owner = texts(table[client])
    if "" in owner:
        row = owner.tolist().index("") + 1
        raise DataError(f"`client`: {client!r} is empty in row {row}; fill it or drop the row")
    return {who: rows_of(table, np.flatnonzero(owner == who)) for who in np.unique(owner).tolist()}


def files_of(pattern: str | Path, missing: bool = False) -> dict[str, Path]:
    """Return the files that a pattern stands for, by the names of the clients: the files' names without endings.

    Args:
        pattern: Such as `hospitals/*.csv`.
        missing: Whether there may be none.
    """
    place = Path(pattern)
    root = Path(place.anchor) if place.is_absolute() else Path()
    files = sorted(root.glob(str(place.relative_to(root))))
    if not files and not missing:
        raise DataError(f"no file is named {str(pattern)!r}; check the pattern")
    found = {file.name.partition(".")[0]: file for file in files}
    if len(found) < len(files):
        raise DataError(f"two files of {str(pattern)!r} have the same name; give a dictionary")
    return found


def is_pattern(path: str | Path) -> bool:
    """Return whether a path stands for several files."""
    return any(mark in str(path) for mark in "*?[")


def as_columns(rows: Any, who: str) -> dict[str, Array]:
    """Return a table in any form as columns by name: a file, a DataFrame, an Arrow table, columns or a list of rows."""
    if isinstance(rows, str | Path):
        return columns.read(Path(rows))
    if isinstance(rows, list) and rows and isinstance(rows[0], Mapping):
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping) or row.keys() != rows[0].keys():
                raise DataError(f"row {number + 1} of {who} has other columns than row 1")
        return {str(name): np.array([row[name] for row in rows]) for name in rows[0]}
    if isinstance(rows, Mapping):
        found = {str(name): np.asarray(cells) for name, cells in rows.items()}
    elif hasattr(rows, "column_names") and hasattr(rows, "to_pydict"):  # Arrow
        found = {name: np.asarray(cells) for name, cells in rows.to_pydict().items()}
    elif hasattr(rows, "columns") and hasattr(rows, "to_numpy"):  # pandas
        if len(set(rows.columns)) < len(rows.columns):
            raise DataError(f"{who} has two columns of one name; rename one")
        found = {str(name): rows[name].to_numpy() for name in rows.columns}
    else:
        raise DataError(f"{who} must be a table or a file, got {shown(rows)}")
    sizes = {name: len(cells) for name, cells in found.items() if cells.ndim}
    if len(sizes) < len(found) or len(set(sizes.values())) > 1:
        raise DataError(f"{who} has columns of different length: {sizes}")
    return found


def rows_of(table: Mapping[str, Array], index: Array) -> dict[str, Array]:
    """Return some rows of a table."""
    return {name: cells[index] for name, cells in table.items()}


def union_of_classes(found: Iterable[Sequence[str]]) -> list[Any]:
    """Return the classes of several clients, sorted: names, or whole numbers."""
    names = {name for one in found for name in one}
    if len(names) < 2:
        raise DataError(f"`target` has one class only, {min(names, default='')!r}")
    whole = all(name.lstrip("-").isdigit() for name in names)
    return sorted(map(int, names)) if whole else sorted(names)


def classes_of(goals: Mapping[str, Array]) -> list[Any]:
    """Return the classes of all clients' targets, sorted: names, or whole numbers."""
    found: list[list[str]] = []
    for who, goal in goals.items():
        if goal.ndim != 1 or (goal.dtype.kind == "f" and (goal != np.round(goal)).any()):
            raise DataError(
                f"`target` of {who} has fractions or gaps; classes are names or whole numbers"
            )
        names = texts(goal)
        if "" in names:
            row = names.tolist().index("") + 1
            raise DataError(f"{who}: the target is empty in row {row}; fill it or drop the row")
        found.append(np.unique(names).tolist())
    return union_of_classes(found)


def _numbers(goal: Array, target: str, who: str) -> npt.NDArray[np.float64]:
    try:
        found = goal.reshape(len(goal), -1).astype(np.float64)
    except ValueError:
        raise DataError(f"{who}: the target {target!r} is text; use classes") from None
    if not np.isfinite(found).all():
        row = int(np.flatnonzero(~np.isfinite(found).all(1))[0]) + 1
        raise DataError(f"{who}: the target {target!r} has no number in row {row}; drop the row")
    return found
