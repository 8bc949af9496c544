"""Features of tables: what each column is, agreed by all clients without pooling their rows.

     1  every client describes its columns: type, gaps, how many values differ, texts and their counts    `describe`
     2  the server decides what each column is, and which are left out and why                           `agree`
     3  every client sends counts and sums, then squares about the common mean                           `sums`
     4  the server has the mean and standard deviation of all rows                                        `scaled`

A `Schema` then turns a client's columns, or new rows, into a matrix of features. It is plain values, saved as JSON.
The steps are the same in one process and across machines. Steps 3 and 4 use sums over clients alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedspan.core.errors import DataError, did_you_mean, one_of

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Facts = dict[str, dict[str, Any]]  # what a client tells of each column
Kind = Literal["number", "boolean", "category", "date", "unused"]
MISSING = ("", "?", "na", "n/a", "nan", "nat", "null", "none", "<na>")
TRUE, FALSE = ("true", "yes", "t", "y", "1"), ("false", "no", "f", "n", "0")
MOST_CATEGORIES = 100  # different texts of a column above which it is not encoded by itself
FEW_ROWS = 20  # rows below which all-different values say nothing
PARTS = ("year", "month", "day", "weekday", "hour")  # of a date


@dataclass(frozen=True, kw_only=True)
class Features:
    """How the columns of tables become features.

    Args:
        features: The columns to use, also if they look like ids; by default all that can be used.
        ignore: Columns to leave out.
        categories: Columns of whole numbers that are codes and no amounts, or of many different texts.
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
    missing: Literal["mean", "refuse"] = "mean"  # what an empty cell becomes
    encode: Literal["onehot", "index"] = "onehot"  # how a category is encoded
    standardize: Literal["pooled", "client", "none"] = (
        "pooled"  # mean 0, deviation 1 over whose rows
    )

    def __post_init__(self) -> None:
        one_of("missing", self.missing, ("mean", "refuse"))
        one_of("encode", self.encode, ("onehot", "index"))
        one_of("standardize", self.standardize, ("pooled", "client", "none"))


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
    encode: str = "onehot"
    missing: str = "mean"
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
            if column.kind == "category" and self.encode == "onehot":
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

    def features(
        self, table: Mapping[str, Any], who: str = "the table", own: Schema | None = None
    ) -> Floats:
        """Return the features of a table's rows, (rows, width).

        Args:
            table: The columns by name, in any order. Those that the schema leaves out may be missing.
            who: Whose table it is, for errors.
            own: The schema with a client's own means and deviations, if numbers are scaled by these.
        """
        there = [str(name) for name in table]
        for name in (column.name for column in self.used if column.name not in there):
            hint = did_you_mean(name, set(there))
            raise DataError(f"{who} has no column {name!r}{hint}; the model needs it")
        for name in set(there) - {column.name for column in self.columns} - {*self.others}:
            raise DataError(f"{who} has a column {name!r} that the model does not know; remove it")
        parts: list[Array] = []
        for column, scale in zip(self.used, (own or self).used, strict=True):
            cells = np.asarray(table[column.name])
            if column.kind == "category":
                text = texts(cells)
                known = {name: place for place, name in enumerate(column.categories)}
                index = np.array([known.get(one, -1) for one in text], np.int64)
                if self.missing == "refuse" and "" in text:
                    raise _gap(column.name, who, np.equal(text, ""))
                if self.encode == "index":
                    parts.append(index[:, None] + 1.0)
                else:
                    parts.append((index[:, None] == np.arange(len(known))).astype(np.float64))
                continue
            values = numbers(cells, column, who)
            empty = np.asarray(np.isnan(values).any(1))
            if empty.any() and self.missing == "refuse":
                raise _gap(column.name, who, empty)
            if column.kind != "boolean":
                mean, deviation = np.array(scale.mean), np.array(scale.deviation)
                if self.standardize != "none":
                    values = (values - mean) / deviation
                values[empty] = 0.0 if self.standardize != "none" else mean
            else:
                values[empty] = 0.0
            parts.append(values)
            if column.gaps:
                parts.append(empty[:, None].astype(np.float64))
        lengths = {len(part) for part in parts}
        if len(lengths) > 1:
            raise DataError(f"{who} has columns of different length: {sorted(lengths)}")
        if not parts:
            raise DataError("no column is left to train on; name those to use in `features`")
        return np.concatenate(parts, 1)

    def unknown(self, table: Mapping[str, Any]) -> dict[str, list[str]]:
        """Return the texts of each column that no client had in training; they are encoded as no category."""
        found = {}
        for column in self.used:
            if column.kind == "category" and column.name in table:
                new = set(texts(np.asarray(table[column.name])).tolist()) - {*column.categories, ""}
                if new:
                    found[column.name] = sorted(new)
        return found

    def lines(self) -> list[str]:
        """Return what is used, encoded and left out, in a few lines."""
        of = {
            kind: [c for c in self.used if c.kind == kind] for kind in ("number", "boolean", "date")
        }
        said = [f"{self.width} features of {len(self.used)} columns"]
        words = {
            "pooled": ", scaled by all clients' mean and deviation",
            "client": ", scaled by each client's own mean and deviation",
            "none": "",
        }
        for kind, label in (
            ("number", f"numbers{words[self.standardize]}"),
            ("boolean", "yes or no"),
            ("date", f"dates, as {', '.join(PARTS)}{words[self.standardize]}"),
        ):
            if of[kind]:
                said.append(f"{label}: {', '.join(c.name for c in of[kind])}")
        sorts = [f"{c.name} ({len(c.categories)})" for c in self.used if c.kind == "category"]
        if sorts:
            said.append(f"categories, by {self.encode}: {', '.join(sorts)}")
        if gaps := [c.name for c in self.used if c.gaps]:
            said.append(
                f"with empty cells, as the mean and a feature that says so: {', '.join(gaps)}"
            )
        said += [f"left out: {c.name} ({c.why})" for c in self.columns if c.kind == "unused"]
        return said

    def table(self) -> dict[str, Any]:
        """Return the schema as plain values."""
        return dataclasses.asdict(self)

    @staticmethod
    def of(table: Mapping[str, Any]) -> Schema:
        """Return the schema of plain values."""
        rows: list[dict[str, Any]] = table["columns"]
        columns = [
            Column(**{key: tuple(v) if isinstance(v, list) else v for key, v in one.items()})  # type: ignore[arg-type]
            for one in rows
        ]
        others = tuple(table["others"])
        return Schema(
            tuple(columns), table["encode"], table["missing"], table["standardize"], others
        )


def texts(cells: Array) -> Array:
    """Return cells as texts, whatever their type; "" for an empty one. A whole number is written without a point."""
    if cells.dtype.kind == "f":
        whole = np.isfinite(cells) & (cells == np.round(cells)) & (np.abs(cells) < 2**53)
        return np.array(
            [
                str(int(c)) if w else "" if c != c else str(c)
                for c, w in zip(cells, whole, strict=True)
            ]
        )
    found = np.array([str(one).strip() for one in cells.tolist()])
    if not found.size:
        return np.array([], str)
    return np.where(np.isin(np.char.lower(found), MISSING), "", found)


def numbers(cells: Array, column: Column, who: str) -> Floats:
    """Return the numbers of a column, (rows, 1) or (rows, parts of a date); NaN for an empty cell."""
    if column.kind == "date":
        return _dates(cells, column.name, who)
    if cells.dtype.kind in "biuf":
        return cells.astype(np.float64)[:, None]
    text = np.char.lower(texts(cells)) if cells.size else np.array([], str)
    if column.kind == "boolean":
        known = (
            dict.fromkeys(TRUE, 1.0)
            | dict.fromkeys(FALSE, 0.0)
            | {"": np.nan, "1.0": 1.0, "0.0": 0.0}
        )
        wrong = ~np.isin(text, list(known))
    else:
        known = {}
        for one in np.unique(text).tolist():
            try:
                known[one] = float(one) if one else np.nan
            except ValueError:
                continue
        wrong = ~np.isin(text, list(known))
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        want = "a number" if column.kind == "number" else "yes or no"
        raise DataError(
            f"{who}: column {column.name!r} is {str(cells[row])!r} in row {row + 1}, not {want}"
        )
    return np.array([known[one] for one in text.tolist()], np.float64).reshape(-1, 1)


def describe(
    table: Mapping[str, Any], asked: Features, others: Iterable[str] = (), who: str = "the table"
) -> Facts:
    """Return what a client tells of its columns: type, rows, gaps, how many values differ, texts with their counts."""
    facts: Facts = {}
    for name in (name for name in map(str, table) if name not in {*others, *asked.ignore}):
        cells = np.asarray(table[name])
        if cells.ndim != 1:
            facts[name] = {"rows": len(cells), "type": "array"}
            continue
        coded = name in asked.categories
        used = asked.features is None or name in asked.features
        kind, filled = _typed(texts(cells) if coded else cells, coded)
        if kind == "text" and used and not coded:
            read = [_is_number(cell) for cell in filled.tolist()]
            if 2 * sum(read) > len(read):
                word = str(filled[read.index(False)])
                row = texts(cells).tolist().index(word) + 1
                raise DataError(
                    f"{who}: column {name!r} has numbers but {word!r} in row {row}; correct it, or name the column in "
                    "`categories` or `ignore`"
                )
        values, counts = np.unique(filled, return_counts=True)
        number = kind == "number"
        facts[name] = {
            "rows": len(cells),
            "type": kind,
            "gaps": len(cells) - len(filled),
            "distinct": len(values),
            "whole": number and bool((values == np.round(values)).all()),
            "binary": number and bool(np.isin(values, (0, 1)).all()),
            "same": str(values[0]) if len(values) == 1 else None,
        }
        if kind == "text":
            listed = coded or len(values) <= MOST_CATEGORIES
            pairs = zip(values.tolist(), counts.tolist(), strict=True)
            facts[name]["texts"] = dict(pairs) if listed else {}
    return facts


def _typed(cells: Array, coded: bool) -> tuple[str, Array]:
    """Return the type of a client's column, and the cells that are not empty."""
    if cells.dtype.kind in "iufbM":
        filled = cells[~(np.isnat(cells) if cells.dtype.kind == "M" else np.isnan(cells))]
        kind = {"M": "date", "b": "boolean"}.get(cells.dtype.kind, "number")
        return (kind if len(filled) else "empty"), filled
    text = texts(cells)
    filled = text[text != ""]
    values = np.unique(filled)
    if not len(values):
        return "empty", filled
    if coded:
        return "text", filled
    if all(_is_number(one) for one in values.tolist()):
        return "number", filled.astype(np.float64)
    if {one.lower() for one in values.tolist()} <= {*TRUE, *FALSE}:
        return "boolean", filled
    return ("date" if _are_dates(values) else "text"), filled


def _is_number(cell: str) -> bool:
    """Return whether a cell is a number; Python would also read 1_000 and digits of other scripts."""
    try:
        float(cell)
    except ValueError:
        return False
    return cell.isascii() and "_" not in cell


def agree(told: Mapping[str, Facts], asked: Features, others: Sequence[str] = ()) -> Schema:
    """Return what each column is, from what all clients tell, by their names; sums are still missing."""
    columns = []
    named = asked.features
    for name in (*(named or ()), *asked.categories):
        for client, facts in told.items():
            if name not in facts:
                hint = did_you_mean(name, set(facts))
                raise DataError(
                    f"{client} has no column {name!r}{hint}; `features` or `categories` name it"
                )
    everywhere = list(dict.fromkeys(name for facts in told.values() for name in facts))
    for name in dict.fromkeys((*(named or ()), *everywhere)):
        if named is not None and name not in named:
            columns.append(Column(name, "unused", "not in `features`"))
            continue
        without = [client for client, facts in told.items() if name not in facts]
        if without:
            columns.append(Column(name, "unused", f"{without[0]} has no such column"))
            continue
        columns.append(_decided(name, {who: facts[name] for who, facts in told.items()}, asked))
    if not any(column.kind != "unused" for column in columns):
        why = "; ".join(f"{column.name}: {column.why}" for column in columns)
        raise DataError(
            f"no column can be used as a feature ({why}); name those to use in `features`"
        )
    others = (*others, *asked.ignore)
    return Schema(tuple(columns), asked.encode, asked.missing, asked.standardize, others)


def _decided(name: str, facts: Mapping[str, dict[str, Any]], asked: Features) -> Column:
    """Return what a column is, from what every client tells of it."""
    given = name in asked.categories or name in (asked.features or ())
    kinds = {fact["type"] for fact in facts.values()} - {"empty"}
    rows = sum(fact["rows"] for fact in facts.values())
    gaps = any(fact.get("gaps") for fact in facts.values())
    if asked.missing == "refuse" and gaps:
        who = next(who for who, fact in facts.items() if fact.get("gaps"))
        raise DataError(
            f'{who} has {facts[who]["gaps"]} empty cells in column {name!r}; fill them, or set `missing` to "mean"'
        )
    if not kinds:
        return Column(name, "unused", "all cells are empty")
    if "array" in kinds:
        return Column(name, "unused", "has more than one value per row")
    if kinds == {"boolean", "number"} and all(f.get("binary", True) for f in facts.values()):
        kinds = {"boolean"}
    if kinds == {"boolean", "text"}:  # a client with a few texts alone
        kinds = {"text"}
    if len(kinds) > 1:
        one, other = (
            next(w for w, f in facts.items() if f["type"] == kind) for kind in sorted(kinds)[:2]
        )
        a, b = sorted(kinds)[:2]
        raise DataError(
            f"column {name!r} is {WORDS[a]} at {one} and {WORDS[b]} at {other}; clean it, or name it in "
            "`categories` or `ignore`"
        )
    (kind,) = kinds
    if not given:
        known = [fact for fact in facts.values() if fact["type"] != "empty"]
        single = [fact.get("same") for fact in known]
        if len(known) > 1 and all(single) and len(set(single)) == len(known):
            return Column(name, "unused", "one value per client, different at each")
        differ = all(fact.get("distinct") == fact["rows"] - fact["gaps"] for fact in known)
        ids = kind == "text" or (kind == "number" and all(fact["whole"] for fact in known))
        if ids and differ and rows >= FEW_ROWS:
            return Column(
                name, "unused", "all values differ, as in an id; name it in `features` to use it"
            )
        if len(set(single)) == 1 and single[0] is not None and not gaps:
            return Column(name, "unused", f"is {single[0]!r} in all rows")
    if kind == "text":
        found: dict[str, int] = {}
        for fact in facts.values():
            if fact["type"] == "text" and not fact["texts"]:
                return _many(name, fact["distinct"], given)
            for text, count in fact.get("texts", {}).items():
                found[text] = found.get(text, 0) + count
        if len(found) > MOST_CATEGORIES and name not in asked.categories:
            return _many(name, len(found), given)
        return Column(name, "category", categories=(*sorted(found), *(("",) if gaps else ())))
    if kind == "number" and all(fact.get("binary", True) for fact in facts.values()):
        kind = "boolean"
    return Column(name, kind, gaps=gaps)


WORDS = {"number": "numbers", "text": "text", "date": "dates", "boolean": "yes or no"}


def _many(name: str, count: int, given: bool) -> Column:
    if given:
        raise DataError(
            f"column {name!r} of `features` has {count} different texts; name it in `categories` too to encode them"
        )
    return Column(
        name, "unused", f"{count} different texts; name it in `categories` to encode them"
    )


def sums(schema: Schema, table: Mapping[str, Any], who: str, about: bool) -> Floats:
    """Return a client's sums for the means, or with `about` those of squares about the means that the schema has.

    For each number of a row: how many there are, then their sum.
    """
    found = []
    for column in (column for column in schema.used if column.numbers):
        if column.name not in table:
            raise DataError(f"{who} has no column {column.name!r}")
        values = numbers(np.asarray(table[column.name]), column, who)
        if about:
            values = (values - np.array(column.mean)) ** 2
        found.append(np.stack([(~np.isnan(values)).sum(0), np.nansum(values, 0)], 1))
    return np.concatenate(found).ravel() if found else np.zeros(0)


def scaled(schema: Schema, total: Floats, about: bool) -> Schema:
    """Return the schema with means, or with `about` the deviations, from the sum of all clients' `sums`."""
    columns, start = [], 0
    for column in schema.columns:
        if column.kind != "unused" and column.numbers:
            count, sum_ = total[start : start + 2 * column.numbers].reshape(-1, 2).T
            start += 2 * column.numbers
            mean = sum_ / np.maximum(count, 1)
            if about:
                root = np.sqrt(mean)  # a constant column stays
                column = replace(column, deviation=tuple(np.where(root > 0, root, 1.0).tolist()))
            else:
                column = replace(column, mean=tuple(mean.tolist()))
        columns.append(column)
    return replace(schema, columns=tuple(columns))


def own_scale(schema: Schema, table: Mapping[str, Any], who: str) -> Schema:
    """Return the schema with the means and deviations of one client's own rows."""
    for about in (False, True):
        schema = scaled(schema, sums(schema, table, who, about), about)
    return schema


def agreed(
    tables: Mapping[str, Mapping[str, Any]], asked: Features, others: Sequence[str] = ()
) -> Schema:
    """Return the schema of clients' tables in one process: the steps that clients on their own machines take."""
    told = {who: describe(table, asked, others, who) for who, table in tables.items()}
    schema = agree(told, asked, others)
    for about in (False, True):
        total = sum(sums(schema, table, who, about) for who, table in tables.items())
        schema = scaled(schema, np.asarray(total), about)
    return schema


def _gap(name: str, who: str, empty: Array) -> DataError:
    row = int(np.flatnonzero(empty)[0]) + 1
    return DataError(
        f'{who}: column {name!r} is empty in row {row}; fill it, or set `missing` to "mean"'
    )


def _are_dates(values: Array) -> bool:
    if not all(len(value) >= 8 and "-" in value for value in values[:5].tolist()):
        return False
    try:
        _times(values)
    except ValueError:
        return False
    return True


def _times(values: Array) -> Array:
    """Return texts such as 2013-01-31, 2013-01-31 05:00 or 2013-01-31T05:00:00Z as times; "" as NaT."""
    plain = [
        one.replace(" ", "T").removesuffix("Z").removesuffix("+00:00") or "NaT"
        for one in values.tolist()
    ]
    return np.array(plain, "datetime64[s]")


def _dates(cells: Array, name: str, who: str) -> Floats:
    try:
        times = cells.astype("datetime64[s]") if cells.dtype.kind == "M" else _times(texts(cells))
    except ValueError:
        for row, one in enumerate(texts(cells).tolist()):
            try:
                _times(np.array([one]))
            except ValueError:
                raise DataError(
                    f"{who}: column {name!r} is {one!r} in row {row + 1}, not a date such as 2013-01-31"
                ) from None
        raise
    days = times.astype("datetime64[D]")
    months = days.astype("datetime64[M]")
    parts = [
        days.astype("datetime64[Y]").astype(np.int64) + 1970,
        months.astype(np.int64) % 12 + 1,
        (days - months).astype(np.int64) + 1,
        (days.astype(np.int64) + 3) % 7,  # Monday is 0
        (times - days).astype(np.int64) // 3600,
    ]
    found = np.stack(parts, 1).astype(np.float64)
    found[np.isnat(times)] = np.nan
    return found
