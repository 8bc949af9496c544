"""The columns of a file that are a model's inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedspan.core.errors import DataError, SpecError, did_you_mean
from fedspan.data.columns import Array, Columns, is_plain


def check(given: tuple[str, ...], target: str | None) -> None:
    """Refuses an empty list of features, a feature named twice, and the target among them."""
    if not given:
        raise SpecError(
            "`features` is empty; name the columns of inputs, or leave it out to use all columns of numbers"
        )
    if twice := [name for name in given if given.count(name) > 1]:
        raise SpecError(f"`features` names {twice[0]!r} twice; name it once")
    if target in given:
        raise SpecError(
            f"`features` has the target {target!r}, which the model must not see; remove it"
        )


def stacked(
    found: Columns, given: tuple[str, ...] | None, others: set[str | None], path: Path
) -> Array:
    """The given columns side by side; where none are given, all columns of numbers besides the others."""
    names = given or tuple(_numeric(found, others, path))
    parts = [_feature(column_of(found, name, "features", path), name, path) for name in names]
    if len(parts) == 1 and parts[0].ndim > 1:
        return parts[0]
    lengths = {len(part) for part in parts}
    if len(lengths) > 1 or any(part.ndim > 2 for part in parts):
        shapes = ", ".join(
            f"{name!r} {part.shape}" for name, part in zip(names, parts, strict=True)
        )
        raise DataError(
            f"`task.data.features` do not fit together in {str(path)!r}: {shapes}; name those to use"
        )
    return np.column_stack(parts)


def known(found: Columns) -> str:
    """The names of the columns, for a message."""
    names = list(found)
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


def column_of(found: Columns, name: str, key: str, path: Path) -> Array:
    """The column that `task.data.<key>` names."""
    if name not in found:
        hint = did_you_mean(name, set(found))
        raise DataError(
            f"`task.data.{key}`: {str(path)!r} has no column {name!r}{hint}; it has {known(found)}"
        )
    column = found[name]
    if column.ndim == 0 or not column.size:
        what = "is a single value" if column.ndim == 0 else f"is empty, of shape {column.shape}"
        raise DataError(
            f"`task.data.{key}`: {name!r} of {str(path)!r} {what}; a column has one row per example, name the columns "
            "to use"
        )
    if column.dtype.kind == "O" or (key in ("client", "test_column", "images") and column.ndim > 1):
        raise DataError(
            f"`task.data.{key}`: {name!r} of {str(path)!r} has lists or tables; name a column with one value per row"
        )
    return column


def _numeric(found: Columns, others: set[str | None], path: Path) -> list[str]:
    """The columns of numbers; a column of numbers with a few words in it is refused rather than left out."""
    for name, column in found.items():
        if name not in others and column.dtype.kind in "US" and column.ndim == 1:
            numbers = np.array([_is_number(cell) for cell in column], dtype=bool)
            odd = numbers & ~np.array([is_plain(str(cell)) for cell in column], dtype=bool)
            if odd.any() and 2 * numbers.sum() > len(numbers):
                raise DataError(
                    f"`task.data`: {name!r} of {str(path)!r} has {str(column[odd][0])!r} in row {first_row(odd)}, "
                    "which is no plain number; write it with the digits 0 to 9 alone, as in 1000"
                )
            if len(numbers) and numbers.all():
                raise DataError(
                    f"`task.data`: {name!r} of {str(path)!r} has numbers written as text ({str(column[0])!r} in row "
                    "1); write them without quotes, or name the columns to use in `features`"
                )
            if 2 * numbers.sum() > len(numbers):
                raise DataError(
                    f"`task.data`: {name!r} of {str(path)!r} has numbers but {str(column[~numbers][0])!r} in row "
                    f"{first_row(~numbers)}; mend it, or name the columns to use in `features`"
                )
    names = [
        name for name, column in found.items() if name not in others and column.dtype.kind in "biuf"
    ]
    if not names:
        raise DataError(
            f"`task.data`: {str(path)!r} has no column of numbers besides the target; it has {known(found)}"
        )
    return names


def _is_number(cell: Any) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _feature(column: Array, name: str, path: Path) -> Array:
    if column.dtype.kind not in "biuf":
        raise DataError(
            f"`task.data.features`: {name!r} of {str(path)!r} is text ({str(column.flat[0])!r} in row 1); leave it out "
            "or write it as numbers"
        )
    if column.dtype.kind == "f" and not np.isfinite(column).all():
        row = first_row(~np.isfinite(column.reshape(len(column), -1)).all(1))
        raise DataError(
            f"`task.data`: {name!r} of {str(path)!r} has no number in row {row}; fill it or drop the row"
        )
    return column


def first_row(mask: Any) -> int:
    """The first row that is marked, from 1."""
    return int(np.argmax(mask)) + 1
