"""Files of examples as named columns, and images as one array of bytes. Nothing is unpickled.

A column is an array with one row per example. In text files a column of numbers becomes int64 or float64; an empty
cell, "NA", "nan", "null" or "?" among numbers becomes NaN. All other columns are text.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import gzip
import itertools
import json
import os
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file

from fedspan.core.digest import digest as core_digest
from fedspan.core.digest import sha256
from fedspan.core.errors import DataError, did_you_mean, one_line
from fedspan.core.extras import needs

Array = npt.NDArray[Any]
Columns = dict[str, Array]


class Rows(Columns):
    """Some rows of a table, and their places in it, which errors name."""

    places: Array


# what the readers raise on damaged files and on types that they do not know
UNREADABLE = (
    ValueError, TypeError, KeyError, OSError, EOFError, RuntimeError, OverflowError, MemoryError, SyntaxError,
    csv.Error, zipfile.BadZipFile, zlib.error, struct.error, SafetensorError,
)  # fmt: skip
MOST_BYTES = 200_000_000  # of a directory whose every byte is hashed
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
MISSING = ("", "?", "na", "n/a", "nan", "nat", "null", "none", "<na>")


def read(path: Path) -> Columns:
    """The columns of a file.

    Raises:
        DataError: The file is missing, of an unknown kind, or cannot be read.
    """
    suffix = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    if suffix not in READERS:
        raise DataError(
            f"`task.data`: {str(path)!r} is not one of {', '.join(READERS)}, nor a directory of images"
        )
    if not path.is_file():
        raise DataError(f"`task.data`: {str(path)!r} does not exist")
    try:
        columns = READERS[suffix](path)
    except UNREADABLE as error:
        raise DataError(
            f"`task.data`: {str(path)!r} cannot be read: {one_line(str(error) or type(error).__name__)}; "
            f"write the file again{' as UTF-8' if isinstance(error, UnicodeDecodeError) else ''}"
        ) from None
    if not columns:
        raise DataError(f"`task.data`: {str(path)!r} is empty")
    return columns


def column_of(table: Mapping[str, Any], name: str, who: str, why: str) -> Array:
    """Return a column of a table.

    Args:
        table: The columns by name.
        name: The column.
        who: Whose table it is, for the error if there is no such column.
        why: What needs it, or what to do.
    """
    if name not in table:
        raise DataError(f"{who} has no column {name!r}{did_you_mean(name, table)}; {why}")
    return np.asarray(table[name])


def first_row(mask: Any, table: Any = None) -> int:
    """Return the number of the first row that is marked, from 1: of rows of a table, the number in the whole table."""
    row = int(np.argmax(mask))
    return row + 1 if not isinstance(table, Rows) else int(table.places[row]) + 1


def cell_error(who: str, name: str, cell: object, row: int, want: str) -> DataError:
    """Return the error of a cell that cannot be used, such as "not a number"; no other machine is told the cell."""
    return DataError(
        f"{who}: column {name!r} is {str(cell)!r} in row {row}, {want}",
        f"column {name!r} in row {row} is {want}",
    )


def digest(root: Path, files: Iterable[Path] | None = None) -> str:
    """A hash of a file, or of the names and bytes of several; of more than MOST_BYTES, of their sizes and times.

    Args:
        root: The file, or the directory of all files.
        files: Files to hash; by default the file itself, or all in the directory.
    """
    if files is None:
        files = filter(Path.is_file, sorted(root.rglob("*"))) if root.is_dir() else [root]
    states = []
    for file in files:
        about = file.stat() if file.is_file() else None
        states.append((file, about.st_mtime_ns, about.st_size) if about else (file, 0, -1))
    large = len(states) > 1 and sum(size for *_, size in states) > MOST_BYTES
    return _digest_of(root, tuple(states), large)


@functools.lru_cache(maxsize=64)
def _digest_of(root: Path, states: tuple[tuple[Path, int, int], ...], large: bool) -> str:
    found = []
    for file, changed, size in states:
        said = "missing" if size < 0 else changed if large else sha256(file)
        found.append(repr((os.path.relpath(file, root), size, said)))
    return core_digest(*found)


def read_npz(path: Path) -> Columns:
    """The arrays of an .npz; raises one of UNREADABLE."""
    # a lone array is refused
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        return dict(arrays)


def _csv(path: Path) -> Columns:
    rows: list[list[str]] = []
    with _text(path) as file:
        first = file.readline()
        cells = {one: len(next(csv.reader([first], delimiter=one), [])) for one in ",;\t"}
        separator = max(cells, key=cells.__getitem__)
        lines = csv.reader(itertools.chain([first], file), delimiter=separator)
        names = [name.strip() for name in next(lines, [])]
        if "" in names:
            raise DataError(
                f"`task.data`: {str(path)!r} has no name for column {names.index('') + 1}; name or remove it"
            )
        if len(set(names)) < len(names):
            raise DataError(f"`task.data`: {str(path)!r} has two columns of one name")
        for row in filter(None, lines):
            if len(row) != len(names):
                raise DataError(
                    f"`task.data`: {str(path)!r} has {len(row)} cells in line {lines.line_num}, "
                    f"but {len(names)} columns, separated by {separator!r}"
                )
            rows.append(row)
    if names and not rows:
        raise DataError(f"`task.data`: {str(path)!r} has no rows")
    columns = zip(names, zip(*rows, strict=True), strict=True)
    found = {name: typed([cell.strip() for cell in cells]) for name, cells in columns}
    if separator == ";":
        for name, cells_ in found.items():
            if decimal_commas(cells_):
                found[name] = typed([cell.replace(",", ".") for cell in cells_.tolist()])
    return found


def decimal_commas(cells: Array) -> bool:
    """Return whether all cells are numbers or empty, and some have a decimal comma."""
    if cells.dtype.kind != "U" or not any("," in cell for cell in cells.tolist()):
        return False
    read = {cell for cell in np.unique(cells).tolist() if cell.lower() not in MISSING}
    return all(re.fullmatch(r"[+-]?\d+(,\d+)?", cell) for cell in read)


def is_number(cell: str) -> bool:
    """Return whether a cell is a number; Python would also read 1_000 and digits of other scripts."""
    try:
        float(cell)
    except ValueError:
        return False
    return cell.isascii() and "_" not in cell


def typed(cells: Sequence[str]) -> Array:
    """Cells of text as whole numbers, else as numbers, else as text."""
    text, joined = np.array(cells), "".join(cells)
    if joined.isascii() and "_" not in joined:
        with contextlib.suppress(ValueError):
            return text.astype(np.int64)
        with contextlib.suppress(ValueError):
            missing = np.isin(np.char.lower(text), MISSING)
            return np.where(missing, "nan", text).astype(np.float64)
    return text


def read_rows(path: Path) -> list[Any]:
    """The values of a .jsonl, packed or not; raises one of UNREADABLE."""
    with _text(path) as file:
        return [json.loads(line) for line in file if line.strip()]


def of_rows(rows: list[Any], who: str) -> Columns:
    """Return columns from a dictionary for each row."""
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping) or row.keys() != rows[0].keys():
            raise DataError(f"row {number} of {who} is no object with the keys of row 1")
    return {str(name): _values([row[name] for row in rows]) for name in (rows[0] if rows else ())}


def _values(values: list[Any]) -> Array:
    """A column from values of JSON or Parquet; null is NaN among numbers."""
    if any(isinstance(value, str) for value in values):
        return np.array(["" if value is None else str(value) for value in values])
    found = np.array([np.nan if value is None else value for value in values])
    if found.dtype.kind == "O" and all(isinstance(value, int | float) for value in found):
        return found.astype(np.float64)  # whole numbers of more than 64 bits
    return found


def _jsonl(path: Path) -> Columns:
    return of_rows(read_rows(path), f"`task.data` {str(path)!r}")


def _parquet(path: Path) -> Columns:
    needs("parquet", "pyarrow")
    from pyarrow import parquet

    return {name: _values(cells) for name, cells in parquet.read_table(path).to_pydict().items()}


def _text(path: Path) -> Any:
    """A text file, packed or not; a byte order mark is skipped."""
    opened: Any = gzip.open if path.suffix == ".gz" else open
    return opened(path, "rt", encoding="utf-8-sig", newline="")


READERS: dict[str, Callable[[Path], Columns]] = {
    ".npz": read_npz,
    ".safetensors": load_file,
    ".csv": _csv,
    ".csv.gz": _csv,
    ".tsv": _csv,
    ".jsonl": _jsonl,
    ".jsonl.gz": _jsonl,
    ".parquet": _parquet,
}


# --- Images ---


def class_files(root: Path) -> tuple[list[Path], list[str]]:
    """The images below a directory, and the sub-directory that each is in: its class."""
    files = [file for file in sorted(root.glob("[!.]*/**/*")) if file.suffix.lower() in SUFFIXES]
    if not files:
        raise DataError(
            f"`task.data`: {str(root)!r} has no images; it needs a sub-directory of images for each class"
        )
    return files, [file.relative_to(root).parts[0] for file in files]


def images(files: Sequence[Path], size: int | None = None) -> Array:
    """Images as (n, height, width) where all are gray, else (n, height, width, 3); `size` makes them square."""
    needs("vision", "PIL")
    from PIL import Image

    found: list[Array] = []
    for file in files:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                image = Image.open(file)
            with image:
                if image.mode[0] in "IF":  # converting them would clip the pixels to 255
                    raise DataError(
                        f"`task.data`: the image {str(file)!r} has pixels of more than 8 bits (mode {image.mode!r}); "
                        "save it with 8 bits per channel"
                    )
                plain = image.convert("L" if image.mode in ("1", "L") else "RGB")
                found.append(np.asarray(plain if size is None else plain.resize((size, size))))
        except (*UNREADABLE, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise DataError(
                f"`task.data`: the image {str(file)!r} cannot be read: {one_line(error)}"
            ) from None
        (height, width), first = found[-1].shape[:2], found[0].shape[:2]
        if (height, width) != first:
            raise DataError(
                f"`task.data`: {str(file)!r} is {width} × {height}, but the images before it are {first[1]} × "
                f"{first[0]}; set `image_size`"
            )
    if len({image.ndim for image in found}) > 1:
        found = [image if image.ndim == 3 else np.stack([image] * 3, -1) for image in found]
    return np.stack(found)
