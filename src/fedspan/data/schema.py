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

import copy
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedspan.core.digest import digest
from fedspan.core.errors import DataError, SpecError, did_you_mean
from fedspan.data.columns import (
    MISSING,
    Array,
    cell_error,
    column_of,
    decimal_commas,
    first_row,
    is_number,
)

Table = Mapping[str, Any]  # columns by name
Floats = npt.NDArray[np.float64]
Facts = dict[str, dict[str, Any]]  # type and texts of each of a client's columns
Kind = Literal["number", "boolean", "category", "date", "unused"]
TRUE, FALSE = ("true", "yes", "t", "y", "1"), ("false", "no", "f", "n", "0")
MOST_CATEGORIES = 100  # different texts of a column above which it is not encoded by itself
FEW_ROWS = 20  # rows below which all-different values say nothing
FEW_VALUES = 10  # different whole numbers of a column up to which they may be codes
LISTED = 6  # categories of a column up to which they are printed
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
        gaps: Numbers or texts that stand for empty cells, such as -9: a list for all columns, or a table by column.
        missing: What an empty cell becomes: "mean" is the mean and a further feature that says so; "refuse" refuses it.
        encode: How a category is encoded: "onehot" has a feature for each category; "index" has one, with a number from
            1 for each and 0 for an unknown one, for a model with an embedding.
        standardize: "pooled" gives numbers the mean 0 and the deviation 1 over all clients' rows. "client" does it over
            each client's own rows for its own training and tests, and takes the pooled ones elsewhere. "none" leaves
            numbers as they are.
    """

    features: tuple[str, ...] | None = None  # the columns to use; by default all that can be used
    ignore: tuple[str, ...] = ()  # columns to leave out
    categories: tuple[str, ...] = ()  # columns of codes, such as the number of a ward
    gaps: Any = None  # what stands for empty cells, such as [-9], for all columns or by column
    missing: Literal["mean", "refuse"] = "mean"  # what an empty cell becomes
    encode: Literal["onehot", "index"] = "onehot"  # how a category is encoded
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
    range: tuple[float, ...] = ()  # the least and the largest number, if clients say it
    whole: int = 0  # how many different values it has, if they are few and whole
    parts: tuple[str, ...] = PARTS  # of dates; those without times have no hour

    @property
    def numbers(self) -> int:
        """How many numbers it has per row that have a mean."""
        of_kind = {
            "number": 1,
            "boolean": int(self.gaps),
            "date": len(self.parts),
        }
        return of_kind.get(self.kind, 0)

    @property
    def label(self) -> str:
        """Its name with its categories, the parts of its dates, or the range of its numbers."""
        about = ""
        if self.kind == "category":
            few = len(self.categories) <= LISTED
            about = ", ".join(one or "empty" for one in self.categories) if few else ""
            about = about or str(len(self.categories))
        elif self.kind == "date":
            about = ", ".join(self.parts)
        elif self.range:
            about = " to ".join(f"{x:.0f}" if x.is_integer() else f"{x:.4g}" for x in self.range)
        return f"{self.name} ({about})" if about else self.name


@dataclass(frozen=True)
class Schema:
    """What the columns of all clients' tables are, and the features that they become."""

    columns: tuple[Column, ...]
    encode: str = "onehot"
    missing: str = "mean"
    standardize: str = "pooled"
    others: tuple[str, ...] = ()  # columns that are no features: the target, the client's name
    gaps: Any = None  # what stands for empty cells
    notes: tuple[str, ...] = ()  # more lines on the data: classes, weights

    @property
    def used(self) -> tuple[Column, ...]:
        """The columns that are encoded."""
        return tuple(column for column in self.columns if column.kind != "unused")

    @property
    def names(self) -> list[str]:
        """The name of each feature, in order."""
        found = []
        for column in self.used:
            if column.kind == "category" and self.encode == "onehot":
                found += [f"{column.name}={text or '(empty)'}" for text in column.categories]
            elif column.kind == "date":
                found += [f"{column.name}.{part}" for part in column.parts]
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
        for column in self.used:
            column_of(table, column.name, who, "the model needs it")
        table = blanked(table, self.gaps)
        for name in {*table} - {column.name for column in self.columns} - {*self.others}:
            raise DataError(f"{who} has a column {name!r} that the model does not know; remove it")
        parts: list[Array] = []
        values: Any
        for column in self.used:
            if column.kind == "category":
                text = texts(np.asarray(table[column.name]))
                empty = np.equal(text, "")
                known = {name: place for place, name in enumerate(column.categories)}
                place = np.array([known.get(one, -1) for one in text.tolist()], np.int64)[:, None]
                values = place + 1
                if self.encode == "onehot":
                    values = place == np.arange(len(known))
            else:
                values = numbers(table, column, who)
                empty = np.isnan(values).any(1)
                mean, deviation = (np.array(one or 0.0) for one in (column.mean, column.deviation))
                values = np.where(empty[:, None], mean, values)
                if column.kind != "boolean" and self.standardize != "none":
                    values = (values - mean) / deviation
            if self.missing == "refuse" and empty.any():
                raise DataError(
                    f"{who}: column {column.name!r} is empty in row {first_row(empty)}; fill it, or set `missing` to "
                    '"mean"'
                )
            parts += [values, empty[:, None]] if column.gaps else [values]
        return np.concatenate(parts, 1, dtype=np.float64)

    def news(self, table: Table, who: str = "the table") -> Iterator[str]:
        """Yield what a table has that no client's training rows had: categories, and empty cells, in a line each."""
        table = blanked(table, self.gaps)
        for column in (column for column in self.used if column.name in table):
            if column.kind == "category":
                found = texts(np.asarray(table[column.name]))
                empty, instead = int((found == "").sum()), "no category"
                if new := sorted({*found.tolist()} - {*column.categories, ""}):
                    listed = ", ".join(map(repr, new[:5])) + (", …" if len(new) > 5 else "")
                    yield f"column {column.name!r} has categories that training did not have: {listed}"
            else:
                empty = int(np.isnan(numbers(table, column, who)).any(1).sum())
                instead = "the mean" if column.mean else "no"
            if empty and not column.gaps and "" not in column.categories:
                yield (
                    f"column {column.name!r} has empty cells ({empty:,}) and had none in training; they count as "
                    f"{instead}"
                )

    def lines(self) -> list[str]:
        """Return what is used, encoded and left out, in a few lines."""
        whose = {"pooled": "all clients'", "client": "each client's own"}.get(self.standardize)
        scaled = f", scaled by {whose} mean and deviation" if whose else ""
        width, used = self.width, len(self.used)
        said = [f"{width} feature{'s' * (width > 1)} of {used} column{'s' * (used > 1)}"]
        for kind, label in {
            "number": f"numbers{scaled}",
            "boolean": "yes or no",
            "date": f"dates{scaled}",
            "category": "categories"
            if self.encode == "onehot"
            else "categories, as numbers from 1",
        }.items():
            if names := [column.label for column in self.used if column.kind == kind]:
                said.append(f"{label}: {', '.join(names)}")
        said += [
            f"{column.name} has {column.whole} whole values: name it in `categories` if they are codes"
            for column in self.used
            if column.whole
        ]
        if gaps := [column.name for column in self.used if column.gaps]:
            said.append(
                f"with empty cells, as the mean and a feature that says so: {', '.join(gaps)}"
            )
        said += [f"left out: {c.name} ({c.why})" for c in self.columns if c.kind == "unused"]
        return [*said, *self.notes]

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
        own = {name: tuple(table.get(name, ())) for name in ("others", "notes")}
        return Schema(**{**table, **own, "columns": tuple(columns)})


def gaps_of(gaps: Any, name: str) -> list[str]:
    """Return the texts that stand for empty cells of a column."""
    return [*map(str, gaps.get(name, ()) if isinstance(gaps, Mapping) else gaps or ())]


def blanked(table: Table, gaps: Any, keep: Iterable[str] = ()) -> Any:
    """Return a table without the cells that stand for empty ones: a list for all columns, or a table by column."""
    if not gaps:
        return table
    found: Any = copy.copy(table)
    for name in {*table} - {*keep}:
        codes = gaps_of(gaps, name)
        cells = np.asarray(table[name])
        if cells.dtype.kind in "iuf":
            mask = np.isin(cells, [float(one) for one in codes if is_number(one)])
            found[name] = np.where(mask, np.nan, cells) if mask.any() else cells
        elif cells.dtype.kind in "UO" and cells.ndim == 1:
            mask = np.isin(texts(cells), codes)
            found[name] = np.where(mask, "", texts(cells)) if mask.any() else cells
    return found


def texts(cells: Array) -> Array:
    """Return cells as texts, whatever their type; "" for an empty one. A whole number is written without a point."""
    if cells.dtype.kind == "f":
        found = [str(int(c)) if c.is_integer() and abs(c) < 2**53 else str(c) for c in cells]
    else:
        found = [str(cell).strip() for cell in cells.tolist()]
    text = np.array(found, str)
    return np.where(np.isin(np.char.lower(text), MISSING), "", text)


def numbers(table: Table, column: Column, who: str) -> Floats:
    """Return the numbers of a column, (rows, 1) or (rows, parts of a date); NaN for an empty cell."""
    cells = np.asarray(table[column.name])
    if column.kind == "date":
        return _dates(table, column, who)
    if cells.dtype.kind in "biuf":
        found = cells.astype(np.float64)
        _check_finite(found, table, column.name, who)
        return found[:, None]
    text = np.char.lower(texts(cells))
    known = {"": np.nan}
    if column.kind == "boolean":
        known |= dict.fromkeys((*TRUE, "1.0"), 1.0) | dict.fromkeys((*FALSE, "0.0"), 0.0)
    else:
        known |= {one: float(one) for one in np.unique(text).tolist() if is_number(one)}
    wrong = ~np.isin(text, list(known))
    if wrong.any():
        want = "not a number" if column.kind == "number" else "not yes or no"
        cell = cells[np.argmax(wrong)]
        raise cell_error(who, column.name, cell, first_row(wrong, table), want)
    found = np.array([known[one] for one in text.tolist()], np.float64)
    _check_finite(found, table, column.name, who)
    return found[:, None]


def _check_finite(values: Floats, table: Table, name: str, who: str) -> None:
    """Refuse infinite numbers."""
    if (infinite := np.isinf(values)).any():
        cell, row = values[np.argmax(infinite)], first_row(infinite, table)
        raise cell_error(who, name, cell, row, "not a finite number; correct it or leave it empty")


def describe(
    table: Table, asked: Features, others: Iterable[str] = (), who: str = "the table"
) -> Facts:
    """Return what each of a client's columns is.

    Its type, its texts if there are up to `MOST_CATEGORIES`, the range of its numbers and their values if these are few
    and whole, and the first cell, with its row, that shows why a text is no number.
    """
    facts: Facts = {}
    for name in (name for name in table if name not in {*others}):
        cells = np.asarray(table[name])
        fact: dict[str, Any] = {
            "texts": None,
            "range": [],
            "values": [],
            "row": 0,
            "cell": "",
        }
        if name in asked.ignore or cells.ndim != 1:
            facts[name] = fact | {"type": "ignored" if name in asked.ignore else "array"}
            continue
        coded = name in asked.categories
        kind, filled = _typed(cells, coded)
        words = [*map(str, np.unique(filled))] if kind in ("text", "boolean") else []
        if kind == "number":
            _check_finite(numbers(table, Column(name, "number"), who)[:, 0], table, name, who)
            values = np.unique(filled).astype(float).tolist()
            fact["range"] = [values[0], values[-1]]
            if len(values) <= FEW_VALUES and all(map(float.is_integer, values)):
                fact["values"] = values
        elif kind == "text" and not coded:
            odd = [word for word in words if not is_number(word)][:MOST_CATEGORIES]
            odd = [word for word in odd if _times([word]) is None] or odd or words
            mask = np.isin(texts(cells), odd)
            fact |= {"row": first_row(mask, table), "cell": str(cells[np.argmax(mask)])}
            if asked.features is None or name in asked.features:
                if decimal_commas(np.array(words)):
                    raise cell_error(
                        who,
                        name,
                        fact["cell"],
                        fact["row"],
                        "a number with a decimal comma; write a point, or separate columns by semicolons",
                    )
                read = [is_number(cell) for cell in filled.tolist()]
                if 2 * sum(read) > len(read):
                    word, remedy = fact["cell"], "name the column in `categories` or `ignore`"
                    raise DataError(
                        f"{who}: column {name!r} has numbers but {word!r} in row {fact['row']}; correct it, give it in "
                        f"`gaps` if it is an empty cell, or {remedy}",
                        f"column {name!r} has numbers but text in row {fact['row']}; correct it, or {remedy}",
                    )
        listed = coded or len(words) <= MOST_CATEGORIES
        facts[name] = fact | {"type": kind, "texts": words if listed else None}
    return facts


def shared(told: Mapping[str, Facts], asked: Features) -> list[str]:
    """Return the columns that may become features: all clients have them, with one value per row."""
    first, *_ = told.values()
    return [
        name
        for name in asked.features or first
        if all(
            name in facts and facts[name]["type"] not in ("array", "ignored")
            for facts in told.values()
        )
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
        filled = cells[cells == cells]  # neither NaN nor NaT
        kind = "boolean" if cells.dtype.kind == "b" else "number"
        if cells.dtype.kind == "M":
            kind = _kind_of_times(filled)
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
    times = _times(values) if all(len(one) >= 8 and "-" in one for one in values[:5]) else None
    return ("text" if times is None else _kind_of_times(times)), filled


def _kind_of_times(times: Array) -> str:
    """Return "time" if some have an hour, else "date"."""
    return "time" if (times != times.astype("datetime64[D]")).any() else "date"


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
    given = {
        "ignore": asked.ignore,
        "gaps": asked.gaps if isinstance(asked.gaps, Mapping) else (),
    }
    for key, name in ((key, name) for key, names in given.items() for name in names):
        if name not in {*everywhere, *others}:
            raise SpecError(
                f"`{key}` names {name!r}, and no client has such a column{did_you_mean(name, everywhere)}"
            )
    for name in asked.ignore:
        everywhere.pop(name, None)
    of_columns = dict(zip(shared(told, asked), counts.reshape(-1, len(TALLIED)), strict=True))
    columns = tuple(_decided(name, told, of_columns.get(name), asked) for name in everywhere)
    if all(column.kind == "unused" for column in columns):
        why = "; ".join(f"{column.name}: {column.why}" for column in columns)
        raise DataError(
            f"no column can be used as a feature ({why}); name those to use in `features`"
        )
    others = (*others, *asked.ignore)
    return Schema(
        columns,
        encode=asked.encode,
        missing=asked.missing,
        standardize=asked.standardize,
        others=others,
        gaps=asked.gaps,
    )


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
    if asked.missing == "refuse" and gaps:
        raise DataError(
            f'column {name!r} has {gaps:,.0f} empty cells; fill them, or set `missing` to "mean"'
        )
    whose = {fact["type"]: who for who, fact in reversed(facts.items()) if fact["type"] != "empty"}
    known = [fact for fact in facts.values() if fact["type"] != "empty"]
    if not known:
        return unused("all cells are empty")
    if whose.keys() <= {"boolean", "number"}:  # where all numbers are 0 and 1
        if not others:
            whose = {"boolean": ""}
    elif whose.keys() == {"boolean", "text"}:  # a client with a few texts alone
        del whose["boolean"]
    elif whose.keys() == {"date", "time"}:
        del whose["date"]
    if len(whose) > 1:
        (one, at), (other, there) = sorted(whose.items())[:2]
        cell, row = facts[there]["cell"], facts[there]["row"]
        where = f" ({f'{cell!r} in ' * bool(cell)}row {row})" if row else ""
        remedy = "clean it, or name it in `categories` or `ignore`"
        if {one, other} & {"date", "time"}:
            remedy = "write all as dates such as 2013-01-31, or name it in `ignore`"
        raise DataError(
            f"column {name!r} is {WORDS[one]} at {at} and {WORDS[other]} at {there}{where}; {remedy}"
        )
    (kind,) = whose
    parts: tuple[str, ...] = PARTS
    if kind in ("date", "time"):
        kind, parts = "date", PARTS if kind == "time" else PARTS[:-1]
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
        column = Column(name, kind, gaps=gaps > 0, parts=parts)
        ends = [end for fact in known for end in fact["range"]]
        if kind == "number" and ends:
            values = {value for fact in known for value in fact["values"]}
            few = len(values) <= FEW_VALUES and all(fact["values"] for fact in known)
            column = replace(column, range=(min(ends), max(ends)), whole=len(values) * few)
        return column
    many = any(fact["texts"] is None for fact in known) or len(found) > MOST_CATEGORIES
    if many and name not in asked.categories:
        count = f"more than {MOST_CATEGORIES} different texts"
        if given:
            raise DataError(
                f"column {name!r} of `features` has {count}; name it in `categories` too to encode them"
            )
        return unused(f"{count}; name it in `categories` to encode them")
    return Column(name, "category", categories=(*sorted(found), *([""] if gaps else [])))


WORDS = {
    "number": "numbers",
    "text": "text",
    "date": "dates",
    "time": "dates",
    "boolean": "yes or no",
}


def sums(schema: Schema, table: Table, who: str, about: bool) -> Floats:
    """Return a client's sums for the means, or with `about` those of squares about the means that the schema has.

    For each number of a row: how many there are, then their sum.
    """
    found = [np.zeros((0, 2))]
    for column in (column for column in schema.columns if column.numbers):
        column_of(table, column.name, who, "the model needs it")
        values = numbers(table, column, who)
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


def lines_of(usage: Mapping[str, Any]) -> list[str]:
    """Return the lines on the schema of a model's usage, if it was trained on tables."""
    return Schema.of(usage["schema"]).lines() if usage.get("schema") else []


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


def _dates(table: Table, column: Column, who: str) -> Floats:
    """Return the parts of dates, (rows, parts); NaN for an empty cell."""
    cells = np.asarray(table[column.name])
    dates = cells.dtype.kind == "M"
    times = cells.astype("datetime64[s]") if dates else _times(texts(cells).tolist())
    if times is None:
        text = texts(cells).tolist()
        wrong = [_times([one]) is None for one in text]
        row = first_row(wrong, table)
        raise cell_error(
            who, column.name, text[wrong.index(True)], row, "not a date such as 2013-01-31"
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
    return np.where(np.isnat(times)[:, None], np.nan, np.stack(parts[: len(column.parts)], 1))
