"""Features of tables: what each column is, agreed by all clients without pooling their rows.

     1  every client describes its columns: types, and the texts of categories                    `describe`
     2  every client counts the cells of its columns: gaps, values that repeat, and so on         `tally`
     3  the server decides what each column is, and which are left out and why                    `agree`
     4  every client sends counts and sums, then squares about the common mean                    `sums`
     5  the server has the mean and standard deviation of all rows                                `scaled`

A `Schema` then turns a client's columns, or new rows, into a matrix of features. It is plain values, saved as JSON.
The steps are the same in one process and across machines. Of steps 2 and 4 the server uses sums over clients alone, so
that secure sums can hide what each client sends.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedspan.core.digest import digest
from fedspan.core.errors import DataError
from fedspan.data.columns import MISSING, Array, column_of, first_row, is_number

Table = Mapping[str, Any]  # columns by name
Floats = npt.NDArray[np.float64]
Facts = dict[str, dict[str, Any]]  # type and texts of each of a client's columns
Kind = Literal["number", "boolean", "category", "date", "unused"]
TRUE, FALSE = ("true", "yes", "t", "y", "1"), ("false", "no", "f", "n", "0")
MOST_CATEGORIES = 100  # different texts of a column above which it is not encoded by itself
FEW_ROWS = 20  # rows below which all-different values say nothing
PARTS = ("year", "month", "day", "weekday", "hour")  # of a date
TALLIED = (
    "rows", "gaps",
    "repeats",  # cells with a value that an earlier cell has
    "fractions", "others",  # numbers that are not whole, and that are neither 0 nor 1
    "several", "hash", "square",  # clients with several values, else a hash of their one value and its square
)  # fmt: skip
SUMMABLE = (1e-118, 1e47)  # sizes of a sum that secure sums add without rounding


@dataclass(frozen=True, kw_only=True)
class Features:
    """How the columns of tables become features.

    Args:
        features: The columns to use, also if they look like ids; by default all that can be used.
        ignore: Columns to leave out.
        categories: Columns of whole numbers that are codes and no amounts, or of many different texts.
        standardize: "pooled" gives numbers the mean 0 and the deviation 1 over all clients' rows. "client" does it over
            each client's own rows for its own training and tests, and takes the pooled ones elsewhere. "none" leaves
            numbers as they are.
    """

    features: tuple[str, ...] | None = None  # the columns to use; by default all that can be used
    ignore: tuple[str, ...] = ()  # columns to leave out
    categories: tuple[str, ...] = ()  # columns of codes, such as the number of a ward
    standardize: Literal["pooled", "client", "none"] = (
        "pooled"  # mean 0, deviation 1 over whose rows
    )


@dataclass(frozen=True)
class Column:
    """A column of the tables, and how it is encoded."""

    name: str
    kind: Kind
    why: str = ""  # it is not used
    categories: tuple[str, ...] = ()  # "" stands for an empty cell
    gaps: bool = False  # whether cells may be empty: one more feature says which
    mean: tuple[float, ...] = ()  # of each number; also what an empty cell becomes
    deviation: tuple[float, ...] = ()

    @property
    def numbers(self) -> int:
        """How many numbers it has per row that have a mean."""
        return {"number": 1, "date": len(PARTS)}.get(self.kind, 0)


@dataclass(frozen=True)
class Schema:
    """What the columns of all clients' tables are, and the features that they become."""

    columns: tuple[Column, ...]
    standardize: str = "pooled"
    others: tuple[str, ...] = ()  # columns that are no features: the target, the client's name

    @property
    def used(self) -> tuple[Column, ...]:
        """The columns that are encoded."""
        return tuple(column for column in self.columns if column.kind != "unused")

    @property
    def names(self) -> list[str]:
        """The name of each feature, in order."""
        found = []
        for column in self.used:
            if column.kind == "category":
                found += [f"{column.name}={text or '(empty)'}" for text in column.categories]
            elif column.kind == "date":
                found += [f"{column.name}.{part}" for part in PARTS]
            else:
                found.append(column.name)
            if column.gaps:
                found.append(f"{column.name} is empty")
        return found

    @property
    def width(self) -> int:
        """How many features a row has."""
        return len(self.names)

    def features(self, table: Table, who: str = "the table") -> Floats:
        """Return the features of a table's rows, (rows, width).

        Args:
            table: The columns by name, in any order. Those that the schema leaves out may be missing.
            who: Whose table it is, for errors.
        """
        cells = {c.name: column_of(table, c.name, who, "the model needs it") for c in self.used}
        for name in {*table} - {column.name for column in self.columns} - {*self.others}:
            raise DataError(f"{who} has a column {name!r} that the model does not know; remove it")
        parts: list[Array] = []
        values: Any
        for column in self.used:
            if column.kind == "category":
                text = texts(cells[column.name])
                empty = np.equal(text, "")
                known = {name: place for place, name in enumerate(column.categories)}
                place = np.array([known.get(one, -1) for one in text.tolist()], np.int64)[:, None]
                values = place == np.arange(len(known))
            else:
                values = numbers(cells[column.name], column, who)
                empty = np.isnan(values).any(1)
                mean, deviation = (np.array(one or 0.0) for one in (column.mean, column.deviation))
                values = np.where(empty[:, None], mean, values)
                if column.numbers and self.standardize != "none":
                    values = (values - mean) / deviation
            parts += [values, empty[:, None]] if column.gaps else [values]
        return np.concatenate(parts, 1, dtype=np.float64)

    def unknown(self, table: Table) -> dict[str, list[str]]:
        """Return the texts of each column that no client had in training; they are encoded as no category."""
        found = {}
        for column in self.used:
            if column.kind == "category" and column.name in table:
                new = {*texts(np.asarray(table[column.name])).tolist()} - {*column.categories, ""}
                if new:
                    found[column.name] = sorted(new)
        return found

    def lines(self) -> list[str]:
        """Return what is used, encoded and left out, in a few lines."""
        whose = {"pooled": "all clients'", "client": "each client's own"}.get(self.standardize)
        scaled = f", scaled by {whose} mean and deviation" if whose else ""
        said = [f"{self.width} features of {len(self.used)} columns"]
        for kind, label in {
            "number": f"numbers{scaled}",
            "boolean": "yes or no",
            "date": f"dates, as {', '.join(PARTS)}{scaled}",
            "category": "categories",
        }.items():
            names = [
                f"{column.name} ({len(column.categories)})" if column.categories else column.name
                for column in self.used
                if column.kind == kind
            ]
            if names:
                said.append(f"{label}: {', '.join(names)}")
        if gaps := [column.name for column in self.used if column.gaps]:
            said.append(
                f"with empty cells, as the mean and a feature that says so: {', '.join(gaps)}"
            )
        return said + [f"left out: {c.name} ({c.why})" for c in self.columns if c.kind == "unused"]

    def table(self) -> dict[str, Any]:
        """Return the schema as plain values."""
        return dataclasses.asdict(self)

    @staticmethod
    def of(table: Table) -> Schema:
        """Return the schema of plain values."""
        columns = [
            Column(**{key: tuple(v) if isinstance(v, list) else v for key, v in one.items()})  # type: ignore[arg-type]
            for one in table["columns"]
        ]
        own = {"columns": tuple(columns), "others": tuple(table["others"])}
        return Schema(**{**table, **own})


def texts(cells: Array) -> Array:
    """Return cells as texts, whatever their type; "" for an empty one. A whole number is written without a point."""
    if cells.dtype.kind == "f":
        found = [str(int(c)) if c.is_integer() and abs(c) < 2**53 else str(c) for c in cells]
    else:
        found = [str(cell).strip() for cell in cells.tolist()]
    text = np.array(found, str)
    return np.where(np.isin(np.char.lower(text), MISSING), "", text)


def numbers(cells: Array, column: Column, who: str) -> Floats:
    """Return the numbers of a column, (rows, 1) or (rows, parts of a date); NaN for an empty cell."""
    if column.kind == "date":
        return _dates(cells, column.name, who)
    if cells.dtype.kind in "biuf":
        return cells.astype(np.float64)[:, None]
    text = np.char.lower(texts(cells))
    known = {"": np.nan}
    if column.kind == "boolean":
        known |= dict.fromkeys((*TRUE, "1.0"), 1.0) | dict.fromkeys((*FALSE, "0.0"), 0.0)
    else:
        known |= {one: float(one) for one in np.unique(text).tolist() if is_number(one)}
    wrong = ~np.isin(text, list(known))
    if wrong.any():
        row = first_row(wrong)
        want = "a number" if column.kind == "number" else "yes or no"
        raise DataError(
            f"{who}: column {column.name!r} is {str(cells[row - 1])!r} in row {row}, not {want}"
        )
    return np.array([known[one] for one in text.tolist()], np.float64)[:, None]


def describe(
    table: Table, asked: Features, others: Iterable[str] = (), who: str = "the table"
) -> Facts:
    """Return the type of each of a client's columns, and the texts of those that have up to `MOST_CATEGORIES`."""
    facts: Facts = {}
    for name in (name for name in table if name not in {*others, *asked.ignore}):
        cells = np.asarray(table[name])
        if cells.ndim != 1:
            facts[name] = {"type": "array", "texts": None}
            continue
        coded = name in asked.categories
        kind, filled = _typed(cells, coded)
        if kind == "text" and not coded and (asked.features is None or name in asked.features):
            read = [is_number(cell) for cell in filled.tolist()]
            if 2 * sum(read) > len(read):
                word = str(filled[read.index(False)])
                row = first_row(texts(cells) == word)
                raise DataError(
                    f"{who}: column {name!r} has numbers but {word!r} in row {row}; correct it, or name the column in "
                    "`categories` or `ignore`"
                )
        words = [*map(str, np.unique(filled))] if kind in ("text", "boolean") else []
        listed = coded or len(words) <= MOST_CATEGORIES
        facts[name] = {"type": kind, "texts": words if listed else None}
    return facts


def shared(told: Mapping[str, Facts], asked: Features) -> list[str]:
    """Return the columns that may become features: all clients have them, with one value per row."""
    first, *_ = told.values()
    return [
        name
        for name in asked.features or first
        if all(name in facts and facts[name]["type"] != "array" for facts in told.values())
    ]


def tally(table: Table, names: Sequence[str], asked: Features, who: str = "the table") -> Floats:
    """Return a client's counts of some columns, in the order of `TALLIED`: whole numbers that are summed over clients.

    With k Σ h² = (Σ h)² over k clients with one value each, whose hashes are h, all of them have the same value.
    """
    found = []
    for name in names:
        cells = column_of(table, name, who, "the model needs it")
        kind, filled = _typed(cells, name in asked.categories)
        read = filled if kind == "number" else np.zeros(0)
        values = np.unique(filled)
        hashed = int(digest(texts(values)[0], size=2), 16) if len(values) == 1 else 0
        found += [
            len(cells), len(cells) - len(filled), len(filled) - len(values), (read != np.round(read)).sum(),
            (~np.isin(read, (0, 1))).sum(), len(values) > 1, hashed, hashed**2,
        ]  # fmt: skip
    return np.array(found, np.float64)


def summed(parts: Iterable[Iterable[float]]) -> Floats:
    """Return the sums of what clients send, rounded once: they are the same in any order, and under secure sums."""
    return np.array([math.fsum(column) for column in zip(*parts, strict=True)])


def _typed(cells: Array, coded: bool) -> tuple[str, Array]:
    """Return the type of a client's column, and the cells that are not empty."""
    if cells.dtype.kind in "iufbM" and not coded:
        kind = {"M": "date", "b": "boolean"}.get(cells.dtype.kind, "number")
        filled = cells[cells == cells]  # neither NaN nor NaT
        return (kind if len(filled) else "empty"), filled
    text = texts(cells)
    filled = text[text != ""]
    values = np.unique(filled).tolist()
    if not values:
        return "empty", filled
    if coded:
        return "text", filled
    if all(map(is_number, values)):
        return "number", filled.astype(np.float64)
    if {one.lower() for one in values} <= {*TRUE, *FALSE}:
        return "boolean", filled
    dates = all(len(one) >= 8 and "-" in one for one in values[:5]) and _times(values) is not None
    return ("date" if dates else "text"), filled


def agree(
    told: Mapping[str, Facts], counts: Floats, asked: Features, others: Sequence[str] = ()
) -> Schema:
    """Return what each column is; sums are still missing.

    Args:
        told: What each client describes.
        counts: The sum of all clients' `tally` of the columns that are `shared`.
        asked: How columns become features.
        others: Columns that are no features.
    """
    named = asked.features or ()
    for name in (*named, *asked.categories):
        for client, facts in told.items():
            column_of(facts, name, client, "`features` or `categories` name it")
    everywhere = dict.fromkeys([*named, *(name for facts in told.values() for name in facts)])
    of_columns = dict(zip(shared(told, asked), counts.reshape(-1, len(TALLIED)), strict=True))
    columns = tuple(_decided(name, told, of_columns.get(name), asked) for name in everywhere)
    if all(column.kind == "unused" for column in columns):
        why = "; ".join(f"{column.name}: {column.why}" for column in columns)
        raise DataError(
            f"no column can be used as a feature ({why}); name those to use in `features`"
        )
    others = (*others, *asked.ignore)
    return Schema(columns, asked.standardize, others)


def _decided(
    name: str, told: Mapping[str, Facts], counts: Floats | None, asked: Features
) -> Column:
    """Return what a column is, from the types and texts of every client and the sum of their counts."""

    def unused(why: str) -> Column:
        return Column(name, "unused", why)

    if asked.features is not None and name not in asked.features:
        return unused("not in `features`")
    for who, all_facts in told.items():
        if name not in all_facts:
            return unused(f"{who} has no such column")
    if counts is None:
        return unused("has more than one value per row")
    rows, gaps, repeats, fractions, others, several, hashes, squares = counts.tolist()
    facts = {who: all_facts[name] for who, all_facts in told.items()}
    whose = {fact["type"]: who for who, fact in reversed(facts.items()) if fact["type"] != "empty"}
    known = [fact for fact in facts.values() if fact["type"] != "empty"]
    if not known:
        return unused("all cells are empty")
    if whose.keys() <= {"boolean", "number"}:  # where all numbers are 0 and 1
        if not others:
            whose = {"boolean": ""}
    elif whose.keys() == {"boolean", "text"}:  # a client with a few texts alone
        del whose["boolean"]
    if len(whose) > 1:
        (one, at), (other, there) = sorted(whose.items())[:2]
        raise DataError(
            f"column {name!r} is {WORDS[one]} at {at} and {WORDS[other]} at {there}; clean it, or name it in "
            "`categories` or `ignore`"
        )
    (kind,) = whose
    found = {text for fact in known for text in fact["texts"] or ()}
    given = name in asked.categories or name in (asked.features or ())
    if not given:
        same = not several and len(known) * squares == hashes**2
        possible = {"boolean": 2, "text": len(found)}.get(kind, len(known))
        if not several and not same and possible == len(known):
            return unused("one value per client")
        ids = kind in ("text", "number") and not fractions
        if ids and not repeats and rows >= FEW_ROWS:
            return unused("all values differ, as in an id; name it in `features` to use it")
        if same and not gaps:
            return unused("one value in all rows")
    if kind != "text":
        return Column(name, kind, gaps=gaps > 0)
    many = any(fact["texts"] is None for fact in known) or len(found) > MOST_CATEGORIES
    if many and name not in asked.categories:
        count = f"more than {MOST_CATEGORIES} different texts"
        if given:
            raise DataError(
                f"column {name!r} of `features` has {count}; name it in `categories` too to encode them"
            )
        return unused(f"{count}; name it in `categories` to encode them")
    return Column(name, "category", categories=(*sorted(found), *([""] if gaps else [])))


WORDS = {"number": "numbers", "text": "text", "date": "dates", "boolean": "yes or no"}


def sums(schema: Schema, table: Table, who: str, about: bool) -> Floats:
    """Return a client's sums for the means, or with `about` those of squares about the means that the schema has.

    For each number of a row: how many there are, then their sum.
    """
    found = [np.zeros((0, 2))]
    for column in (column for column in schema.columns if column.numbers):
        cells = column_of(table, column.name, who, "the model needs it")
        values = numbers(cells, column, who)
        if about:
            values = (values - np.array(column.mean)) ** 2
        found.append(np.stack([(~np.isnan(values)).sum(0), np.nansum(values, 0)], 1))
        size = np.abs(found[-1])
        low, high = SUMMABLE
        if not ((size == 0) | (size > low) & (size < high)).all():
            raise DataError(
                f"{who}: the numbers of column {column.name!r} are too large or too small to add up; rescale it"
            )
    return np.concatenate(found).ravel()


def scaled(schema: Schema, total: Floats, about: bool) -> Schema:
    """Return the schema with means, or with `about` the deviations, from the sum of all clients' `sums`."""
    columns, rest = [], total.reshape(-1, 2)
    for column in schema.columns:
        (count, sum_), rest = rest[: column.numbers].T, rest[column.numbers :]
        mean = sum_ / np.maximum(count, 1)
        if about:
            root = np.sqrt(mean)  # a constant column stays
            column = replace(column, deviation=tuple(np.where(root > 0, root, 1.0).tolist()))
        else:
            column = replace(column, mean=tuple(mean.tolist()))
        columns.append(column)
    return replace(schema, columns=tuple(columns))


def with_scale(schema: Schema, tables: Mapping[str, Table]) -> Schema:
    """Return the schema with the means and deviations of all rows of some clients' tables."""
    for about in (False, True):
        total = summed(sums(schema, table, who, about) for who, table in tables.items())
        schema = scaled(schema, total, about)
    return schema


def agreed(tables: Mapping[str, Table], asked: Features, others: Sequence[str] = ()) -> Schema:
    """Return the schema of clients' tables in one process: the steps that clients on their own machines take."""
    told = {who: describe(table, asked, others, who) for who, table in tables.items()}
    names = shared(told, asked)
    counts = summed(tally(table, names, asked, who) for who, table in tables.items())
    return with_scale(agree(told, counts, asked, others), tables)


def _times(texts: list[str]) -> Array | None:
    """Return texts such as 2013-01-31, 2013-01-31 05:00 or 2013-01-31T05:00:00Z as times; None if one is no date."""
    plain = [
        one.replace(" ", "T").removesuffix("Z").removesuffix("+00:00") or "NaT" for one in texts
    ]
    try:
        return np.array(plain, "datetime64[s]")
    except ValueError:
        return None


def _dates(cells: Array, name: str, who: str) -> Floats:
    """Return the parts of dates, (rows, parts); NaN for an empty cell."""
    dates = cells.dtype.kind == "M"
    times = cells.astype("datetime64[s]") if dates else _times(texts(cells).tolist())
    if times is None:
        text = texts(cells).tolist()
        row = first_row([_times([one]) is None for one in text])
        raise DataError(
            f"{who}: column {name!r} is {text[row - 1]!r} in row {row}, not a date such as 2013-01-31"
        )
    days = times.astype("datetime64[D]")
    months = days.astype("datetime64[M]")
    parts = [
        days.astype("datetime64[Y]").astype(np.int64) + 1970,
        months.astype(np.int64) % 12 + 1,
        (days - months).astype(np.int64) + 1,
        (days.astype(np.int64) + 3) % 7,  # Monday is 0
        (times - days).astype(np.int64) // 3600,
    ]
    return np.where(np.isnat(times)[:, None], np.nan, np.stack(parts, 1))
