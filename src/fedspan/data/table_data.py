"""Tables of several clients as training and test data: features by an agreed schema, targets, a test part of each."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedspan.core import seeds
from fedspan.core.digest import digest
from fedspan.core.errors import DataError, SpecError, below_one, one_of, shown
from fedspan.core.tables import make
from fedspan.data import columns
from fedspan.data.columns import Array, Columns, Rows, cell_error, column_of, first_row
from fedspan.data.schema import (
    FALSE,
    TRUE,
    Column,
    Features,
    Floats,
    Schema,
    agreed,
    blanked,
    describe,
    numbers,
    texts,
    with_scale,
)

Pair = tuple[Tensor, ...]  # features, targets and, of training rows, weights if there are any
MOST_COUNTS = 20  # classes whose counts are printed


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
        counts: Sequence[int] | None = None,
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
            counts: How many training rows of each class they have.
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
        if counts is None and self.classes:
            goals = torch.cat([part["train"][1] for part in self.values()])
            counts = goals.bincount(minlength=len(self.classes)).tolist()
        notes = []
        if counts:
            named = zip(self.classes, counts, strict=True)
            listed = [f"{name} {count:,}" for name, count in named][:MOST_COUNTS]
            listed += ["…"] * (len(self.classes) > MOST_COUNTS)
            notes.append(f"classes: {', '.join(listed)}")
        if weight is not None:
            notes.append(f"rows count by their weight {weight!r} in training")
        self.schema = replace(self.schema, notes=tuple(notes))
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
        names = class_names(goal, who)
        places = places_of(names, self.classes)
        if (wrong := places < 0).any():
            row = first_row(wrong, table)
            told = "which training does not have; remove it"
            raise DataError(
                f"{who} has the class {str(names[wrong][0])!r} in row {row}, {told}",
                f"the target has a class in row {row}, {told}",
            )
        return x, torch.from_numpy(places)


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
    asked = make(Features, features, "tables")
    check_features(asked.features, target)
    others = [target, *filter(None, (client, weight))]
    found = {
        who: blanked(table, asked.gaps, others[1:])
        for who, table in read_clients(clients, client).items()
    }
    goals = {}
    for who, table in found.items():
        goals[f"{who}: the target {target!r}"] = column_of(table, target, who, "`target` names it")
        describe(table, asked, others, who)  # refused here with the row of the table
    if kind is None:
        whole = (
            goal.dtype.kind != "f" or (goal == np.round(goal)).all() for goal in goals.values()
        )
        kind = "classes" if all(whole) else "numbers"
    one_of("kind", kind, ("classes", "numbers"))
    classes = classes_of(goals, kind == "numbers")
    kept, held = {}, {}
    for who, table in found.items():
        train, test = shared_out(np.arange(len(table[target])), test_share, seed, who)
        kept[who], held[who] = rows_of(table, train), rows_of(table, test)
    return TableData(kept, held, target, asked, others, classes=classes, weight=weight)


def shared_out(rows: Array, share: float, seed: int, client: str) -> tuple[Array, Array]:
    """Return a client's rows for training and a share of them for tests; at least one is for training.

    The seed and the client's name or number decide which: other clients, and their order, change nothing.
    """
    number = int(client) if client.isdecimal() else int(digest(client, size=8), 16)
    rng = np.random.Generator(np.random.PCG64(seeds.key(seed, "test share", number)))
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


def check_features(given: tuple[str, ...] | None, target: str | None) -> None:
    """Refuse an empty list of features, a feature named twice, and the target among them."""
    if given == ():
        raise SpecError(
            "`features` is empty; name the columns of inputs, or leave it out to use all columns of numbers"
        )
    given = given or ()
    if twice := [name for name in given if given.count(name) > 1]:
        raise SpecError(f"`features` names {twice[0]!r} twice; name it once")
    if target in given:
        raise SpecError(
            f"`features` has the target {target!r}, which the model must not see; remove it"
        )


def rows_of(table: Columns, index: Array) -> Columns:
    """Return some rows of a table."""
    found = Rows({name: cells[index] for name, cells in table.items()})
    found.places = table.places[index] if isinstance(table, Rows) else index
    return found


def union_of_classes(found: Mapping[str, Iterable[str]]) -> list[Any]:
    """Return the classes of several clients, sorted: names, or whole numbers.

    Several spellings of yes and no, such as 1 and yes, are one class, as in a column of features.
    """
    own = {who: {*names} for who, names in found.items()}
    names = {name for one in own.values() for name in one}
    said_yes = {_is_yes(name) for name in names}
    if None in said_yes:
        _check_spelling(own)
    elif len(said_yes) < len(names):
        names = {"yes" if one else "no" for one in said_yes}
    if len(names) < 2:
        raise DataError(f"`target` has one class only, {min(names, default='')!r}")
    whole = all(re.fullmatch("0|-?[1-9][0-9]*", name) for name in names)
    return sorted(map(int, names)) if whole else sorted(names)


def _is_yes(name: str) -> bool | None:
    """Return whether a class is a yes or a no; None if it is neither."""
    return None if name.lower() not in (*TRUE, *FALSE) else name.lower() in TRUE


def _check_spelling(own: Mapping[str, set[str]]) -> None:
    """Refuse clients that seem to spell classes in their own way.

    They have no class in common with any other client, not even by way of third ones, or are the only one with more
    than yes and no.
    """
    first, *rest = own
    joined = set(own[first])
    while near := [who for who in rest if joined & own[who]]:
        joined = joined.union(*(own[who] for who in near))
        rest = [who for who in rest if who not in near]
    odd = [who for who in own if any(_is_yes(name) is None for name in own[who])]
    if not rest and len(odd) == 1 < len(own):
        more = [name for name in own[odd[0]] if _is_yes(name) is None]
        if not all(name.isdecimal() for name in more):  # such as 2 beside 0 and 1
            rest, first = odd, next(who for who in own if who not in odd)
    if rest:
        a, b = (", ".join(map(repr, sorted(own[who])[:MOST_COUNTS])) for who in (first, rest[0]))
        raise DataError(
            f"{first} has the classes {a}, and {rest[0]} has {b}; write them alike, and drop rows without a class"
        )


def places_of(names: Array, classes: Sequence[Any]) -> npt.NDArray[np.int64]:
    """Return the numbers of classes, which may be spelled in another way if they are yes and no; -1 for another."""
    place = {str(name): number for number, name in enumerate(classes)}
    said = {_is_yes(name): number for name, number in place.items()}
    if len(said) == len(place) == 2 and None not in said:
        place = {name: said.get(_is_yes(name), -1) for name in names.tolist()}
    return np.array([place.get(name, -1) for name in names.tolist()], np.int64)


def classes_of(goals: Mapping[str, Array], are_numbers: bool) -> list[Any]:
    """Return the classes of all targets, sorted: names, or whole numbers; none if the targets are numbers."""
    if are_numbers:
        for who, goal in goals.items():
            numbers_of(goal, who)
        return []
    return union_of_classes({who: class_names(goal, who).tolist() for who, goal in goals.items()})


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
        remedy = "not numbers; name another column, or predict classes"
        raise DataError(
            f"{who} is text ({str(goal.flat[0])!r} in row 1), {remedy}",
            f"the target is text, {remedy}",
        ) from None
    if not np.isfinite(found).all():
        row = first_row(~np.isfinite(found).all(1))
        raise DataError(f"{who} has no number in row {row}; fill it or drop the row")
    return found


def _weights(table: Columns, weight: str, who: str) -> Array:
    """Return the weights of rows."""
    column_of(table, weight, who, "`weight` names it")
    found = numbers(table, Column(weight, "number"), who)[:, 0]
    wrong = ~(found >= 0)
    if wrong.any():
        cell, row = found[np.argmax(wrong)], first_row(wrong, table)
        raise cell_error(
            who,
            weight,
            f"{cell:g}",
            row,
            "not a weight, which is a number of at least 0",
        )
    if not found.any():
        raise DataError(f"{who}: all weights {weight!r} are 0; leave the client out")
    return found
