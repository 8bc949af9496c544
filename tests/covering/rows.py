"""The rows of the covering set on disk, a character for each setting.

Run as a program, it adds rows for what is new; with `--anew` it makes all of them.
"""

from __future__ import annotations

import json
import shutil
import string
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from covering import checks
from covering.pairwise import Row, covering
from covering.settings import factors, fits

FILE = Path(__file__).with_name("rows.json")
MAIN = "method.name"
DEFAULT, MARKS = ".", string.digits + string.ascii_letters


def read() -> tuple[dict[str, list[str]], list[Row]]:
    """(settings with the levels from which the rows were made, rows), first rows with many levels not met before."""
    table = json.loads(FILE.read_text())
    levels = table["factors"]
    rows = [
        {
            name: levels[name][MARKS.index(mark)]
            for name, mark in zip(levels, row, strict=True)
            if mark != DEFAULT
        }
        for row in table["rows"]
    ]
    return levels, rows


def write(rows: list[Row]) -> None:
    """Stores the rows."""
    marks = [
        "".join(
            MARKS[levels.index(row[name])] if name in row else DEFAULT
            for name, levels in factors().items()
        )
        for row in _spread(rows)
    ]
    FILE.write_text(json.dumps({"factors": factors(), "rows": marks}, indent=0) + "\n")


def _spread(rows: list[Row]) -> Iterator[Row]:
    """The rows in the order in which they are stored."""
    met, left = set[tuple[str, str]](), list(rows)
    while left:
        best = max(left, key=lambda row: len(row.items() - met))
        left.remove(best)
        met |= set(best.items())
        yield best


if __name__ == "__main__":
    folder = Path(tempfile.mkdtemp())
    known = [] if "--anew" in sys.argv else read()[1]
    found = covering(factors(), MAIN, fits, lambda row: checks.refusal(row, folder), known)
    write([row for row, why in found if why is None])
    shutil.rmtree(folder)
