"""Tables of several clients as training and test data: features by an agreed schema, targets, a test part of each."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedspan.core import seeds
from fedspan.core.errors import DataError, SpecError, below_one, one_of, shown
from fedspan.core.tables import make
from fedspan.data import columns
from fedspan.data.columns import Array, Columns, column_of, first_row
from fedspan.data.schema import Column, Features, Floats, Schema, agreed, numbers, texts, with_scale

Pair = tuple[Tensor, ...]  # features, targets and, of training rows, weights if there are any


class TableData(dict[str, dict[str, Pair]]):
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
        train: Mapping[str, Columns],
        tests: Mapping[str, Columns],
        target: str,
        asked: Features,
        others: Sequence[str] = (),
        *,
        classes: Sequence[Any],
        weight: str | None = None,
        pooled: Columns | None = None,
        schema: Schema | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Agree on the features of the clients' training rows, unless there is a schema.

        Args:
            train: Each client's training rows, as columns by name.
            tests: Those of a client's rows that it is evaluated on.
            target: The column to predict.
            asked: How columns become features.
            others: Columns that are no features, such as the target.
            classes: The names of the classes; none if the target is a number.
            weight: The column with the weights of training rows.
            pooled: Rows of no client that are for tests.
            schema: What clients on several machines have agreed on.
            dtype: Of features and of targets that are numbers.
        """
        self.target, self.dtype, self.weight = target, dtype, weight
        self.schema = agreed(train, asked, others) if schema is None else schema
        self.classes: list[Any] = [*classes]
        self.own: dict[str, Schema] = {}
        together: list[Pair] = []
        for who, table in train.items():
            own = self.schema
            if own.standardize == "client":
                own = self.own[who] = with_scale(own, {who: table})
            self[who] = {"train": self._pair(table, who, own)}
            if weight is not None:
                weights = torch.from_numpy(_weights(table, weight, who)).to(dtype)
                self[who]["train"] += (weights,)
            if who in tests and len(tests[who][target]):
                self[who]["test"] = self._pair(tests[who], who, own)
                together.append(self._pair(tests[who], who, self.schema))
        if pooled is not None:
            together.append(self._pair(pooled, "the test set", self.schema))
        self.test: Pair | None = None
        if together:
            self.test = tuple(map(torch.cat, zip(*together, strict=True)))

    @property
    def width(self) -> int:
        """How many features a row has."""
        return self.schema.width

    @property
    def outputs(self) -> int:
        """How many outputs a model needs."""
        return len(self.classes) or 1

    def _pair(self, table: Columns, who: str, schema: Schema) -> Pair:
        x = torch.from_numpy(schema.features(table, who)).to(self.dtype)
        goal = column_of(table, self.target, who, "`target` names it")
        who = f"{who}: the target {self.target!r}"
        if not self.classes:
            return x, torch.from_numpy(numbers_of(goal, who)).to(self.dtype)
        names = class_names(goal, who).tolist()
        place = {str(name): number for number, name in enumerate(self.classes)}
        for name in {*names} - place.keys():
            raise DataError(
                f"{who} has the class {name!r}, which training does not have; remove it"
            )
        return x, torch.tensor([place[name] for name in names])


def tables(
    clients: Any,
    target: str,
    *,
    client: str | None = None,
    test_share: float = 0.2,
    seed: int = 0,
    kind: Literal["classes", "numbers"] | None = None,
    weight: str | None = None,
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
        weight: A column with the weights of rows in training, which is no feature: the loss of a batch is the weighted
            mean.
        features: Settings of `Features`, such as `ignore=["name"]` or `standardize="client"`.

    Returns:
        A mapping that `fit` takes as `clients`, with `schema`, `classes`, `width`, `outputs` and `test`.
    """
    below_one("test_share", test_share)
    found = read_clients(clients, client)
    asked = make(Features, features, "tables")
    goals = {
        f"{who}: the target {target!r}": column_of(table, target, who, "`target` names it")
        for who, table in found.items()
    }
    if kind is None:
        whole = (
            goal.dtype.kind != "f" or (goal == np.round(goal)).all() for goal in goals.values()
        )
        kind = "classes" if all(whole) else "numbers"
    one_of("kind", kind, ("classes", "numbers"))
    classes = classes_of(goals, kind == "numbers")
    kept, held = {}, {}
    for number, (who, table) in enumerate(found.items()):
        train, test = shared_out(np.arange(len(table[target])), test_share, seed, number)
        kept[who], held[who] = rows_of(table, train), rows_of(table, test)
    others = [target, *filter(None, (client, weight))]
    return TableData(kept, held, target, asked, others, classes=classes, weight=weight)


def shared_out(rows: Array, share: float, seed: int, client: int) -> tuple[Array, Array]:
    """Return a client's rows for training and a share of them for tests; at least one is for training."""
    rng = np.random.Generator(np.random.PCG64(seeds.key(seed, "test share", client)))
    count = min(round(share * len(rows)), len(rows) - 1)
    drawn = rng.permutation(rows)
    return np.sort(drawn[count:]), np.sort(drawn[:count])


def read_clients(clients: Any, client: str | None = None) -> dict[str, Columns]:
    """Return each client's columns by name; see `tables`."""
    if isinstance(clients, Mapping) and clients and client is None:
        return {str(who): as_columns(table, str(who)) for who, table in clients.items()}
    if isinstance(clients, str | Path) and is_pattern(clients):
        files = files_of(clients)
        if not files:
            raise DataError(f"no file is named {str(clients)!r}; check the pattern")
        return {who: columns.read(file) for who, file in files.items()}
    if client is None:
        raise SpecError(
            "`client` is missing, the column of one table that says whose a row is; or give a dictionary of tables"
        )
    table = as_columns(clients, "the table")
    owner = filled(
        texts(column_of(table, client, "the table", "`client` names it")), f"`client`: {client!r}"
    )
    return {who: rows_of(table, np.flatnonzero(owner == who)) for who in np.unique(owner).tolist()}


def files_of(pattern: str | Path) -> dict[str, Path]:
    """Return the files that a pattern such as `hospitals/*.csv` stands for, by the clients: names without endings."""
    files = sorted(map(Path, glob.glob(str(pattern), recursive=True)))
    found = {file.name.partition(".")[0]: file for file in files}
    if len(found) < len(files):
        raise DataError(f"two files of {str(pattern)!r} have the same name; give a dictionary")
    return found


def is_pattern(path: str | Path) -> bool:
    """Return whether a path stands for several files."""
    return glob.has_magic(str(path))


def as_columns(rows: Any, who: str) -> Columns:
    """Return a table in any form as columns by name: a file, a DataFrame, an Arrow table, columns or a list of rows."""
    if isinstance(rows, str | Path):
        return columns.read(Path(rows))
    if isinstance(rows, list) and rows and isinstance(rows[0], Mapping):
        return columns.of_rows(rows, who)
    if hasattr(rows, "to_pydict"):  # Arrow
        rows = rows.to_pydict()
    if not isinstance(rows, Mapping) and not hasattr(rows, "to_numpy"):  # of a DataFrame
        raise DataError(f"{who} must be a table or a file, got {shown(rows)}")
    names = list(getattr(rows, "columns", rows))
    if len(set(names)) < len(names):
        raise DataError(f"{who} has two columns of one name; rename one")
    found = {str(name): np.asarray(rows[name]) for name in names}
    sizes = {name: len(cells) for name, cells in found.items() if cells.ndim}
    if len(sizes) < len(found) or len(set(sizes.values())) > 1:
        raise DataError(f"{who} has columns of different length: {sizes}")
    return found


def rows_of(table: Columns, index: Array) -> Columns:
    """Return some rows of a table."""
    return {name: cells[index] for name, cells in table.items()}


def union_of_classes(found: Iterable[Iterable[str]]) -> list[Any]:
    """Return the classes of several clients, sorted: names, or whole numbers."""
    names = {name for one in found for name in one}
    if len(names) < 2:
        raise DataError(f"`target` has one class only, {min(names, default='')!r}")
    whole = all(re.fullmatch("0|-?[1-9][0-9]*", name) for name in names)
    return sorted(map(int, names)) if whole else sorted(names)


def classes_of(goals: Mapping[str, Array], are_numbers: bool) -> list[Any]:
    """Return the classes of all targets, sorted: names, or whole numbers; none if the targets are numbers."""
    if are_numbers:
        for who, goal in goals.items():
            numbers_of(goal, who)
        return []
    return union_of_classes({*class_names(goal, who).tolist()} for who, goal in goals.items())


def class_names(goal: Array, who: str) -> Array:
    """Return the names of classes as texts; `who` names the target, for errors."""
    check_classes(goal, who)
    return filled(texts(goal), who)


def check_classes(goal: Array, who: str) -> None:
    """Refuse targets that are no classes."""
    fractions = goal.dtype.kind == "f" and (goal != np.round(goal)).any()
    if fractions or goal.ndim != 1:
        got = "floating-point numbers" if goal.ndim == 1 else f"an array of shape {goal.shape}"
        raise DataError(
            f"{who}: classes are whole numbers or names, got {got}; predict numbers, by the task 'tabular_regression' "
            'or kind="numbers"'
        )


def filled(text: Array, who: str) -> Array:
    """Return texts of which none may be empty."""
    if (text == "").any():
        raise DataError(f"{who} is empty in row {first_row(text == '')}; fill it or drop the row")
    return text


def numbers_of(goal: Array, who: str) -> Floats:
    """Return targets as numbers, (rows, outputs)."""
    try:
        found = goal.reshape(len(goal), -1).astype(np.float64)
    except (TypeError, ValueError):
        raise DataError(
            f"{who} is text ({str(goal.flat[0])!r} in row 1), not numbers; name another column, or predict classes"
        ) from None
    if not np.isfinite(found).all():
        row = first_row(~np.isfinite(found).all(1))
        raise DataError(f"{who} has no number in row {row}; fill it or drop the row")
    return found


def _weights(table: Columns, weight: str, who: str) -> Array:
    """Return the weights of rows."""
    cells = column_of(table, weight, who, "`weight` names it")
    found = numbers(cells, Column(weight, "number"), who)[:, 0]
    good = np.isfinite(found) & (found >= 0)
    if not good.all():
        row = first_row(~good)
        raise DataError(
            f"{who}: the weight in row {row} is {found[row - 1]:g}; weights are numbers of at least 0"
        )
    if not found.any():
        raise DataError(f"{who}: all weights {weight!r} are 0; leave the client out")
    return found
