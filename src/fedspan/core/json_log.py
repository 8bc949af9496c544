"""Small files that a run reads back: JSON with checksums, so that damage is refused and never read as a result.

A table has its own checksum. In a file of lines every line has one that continues that of the line before, so that the
checksum of a line stands for the whole file up to there.
"""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedspan.core.digest import digest
from fedspan.core.errors import CheckpointError, shown
from fedspan.core.files import append, make_dir, write_atomic

Line = dict[str, Any]
Form = Mapping[str, Any]  # key → type
NO_FORM: Form = {}
DEEPEST = 50  # lists and tables in one another
CHECK = "checksum"  # the last key of a table or line
REMEDY = "put it back, or run again in another directory"
SHORT, LONG = (
    6,
    32,
)  # bytes of a checksum: against damage, and against somebody who looks for another text with it


def write_table(path: Path, table: Mapping[str, Any], *, private: bool = False) -> None:
    """Writes a small table."""
    write_atomic(path, table_text(table), private=private)


def table_text(table: Mapping[str, Any]) -> bytes:
    """The text of a small table."""
    return (
        json.dumps({**table, CHECK: digest(json.dumps(table), size=SHORT)}, indent=1) + "\n"
    ).encode()


def read_table(
    path: Path, form: Form = NO_FORM, more: Form = NO_FORM, remedy: str = REMEDY
) -> Line:
    """Reads what `write_table` wrote; CheckpointError with a remedy where it is damaged, or not of its form."""
    try:
        table = dict(json.loads(path.read_bytes()))
        damaged = table.pop(CHECK) != digest(json.dumps(table), size=SHORT)
    except (ValueError, TypeError, KeyError, RecursionError):
        damaged = True
    if damaged:
        raise CheckpointError(f"{str(path)!r} is damaged; {remedy}")
    return check_form(table, path, form, more, remedy)


def check_form(
    table: Any, where: object, form: Form, more: Form = NO_FORM, remedy: str = REMEDY
) -> Line:
    """Gives back a table, and refuses one whose values are of other types: a right checksum is no secret.

    Args:
        table: What was read.
        where: The file, for the error.
        form: Key → type of a value that must be there, such as `int`, `list[str]` or `dict[str, float | None]`.
        more: The same of keys that may be missing; other keys may be anything.
        remedy: What to do about it.
    """
    if not isinstance(table, dict):
        raise CheckpointError(f"{str(where)!r} is damaged: it holds {shown(table)}; {remedy}")
    for key, hint in {**more, **form}.items():
        if key not in table and key in form:
            raise CheckpointError(f"{str(where)!r} is damaged: it has no {key!r}; {remedy}")
        if key in table and not fits(table[key], hint):
            raise CheckpointError(
                f"{str(where)!r} is damaged: {key!r} is {shown(table[key])}; {remedy}"
            )
    return table


def fits(value: Any, hint: Any) -> bool:
    """Whether a value of JSON is of a type; numbers are finite, a whole one is a `float` too, and True is none."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        return isinstance(value, list) and all(fits(one, inner[0]) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(one, inner[1]) for one in value.values())
    if origin is types.UnionType:
        return any(fits(value, one) for one in inner)
    if hint is float and type(value) is float:
        return math.isfinite(value)
    if hint in (int, float):
        return type(value) is int and abs(value) < 1 << 63
    return _shallow(value) if hint is Any else isinstance(value, hint)


def _shallow(value: Any, most: int = DEEPEST) -> bool:
    """Whether a value can be walked without end in sight: no settings are nested that deep."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return most > 0 and all(_shallow(one, most - 1) for one in inner)


class JsonLog:
    """A file of lines that is being written; the checksum of the last line stands for all of them."""

    def __init__(
        self, path: Path, lines: Iterable[Line] = (), size: int = SHORT, private: bool = False
    ) -> None:
        self.path, self.size = path, size
        make_dir(path.parent)
        text, self.check = lines_text(lines, size=size)
        write_atomic(path, text, private=private)

    def append(self, *lines: Line) -> None:
        """Adds lines in one piece."""
        text, check = lines_text(lines, self.check, self.size)
        append(self.path, text)
        self.check = check


def lines_text(
    lines: Iterable[Mapping[str, Any]], before: str = "", size: int = SHORT
) -> tuple[bytes, str]:
    """(the text of lines, the checksum of the last one) after a line with checksum `before`."""
    parts = []
    for line in lines:
        text = json.dumps(line, allow_nan=False)
        before = digest(before + text, size=size)
        parts.append(f'{text[:-1]}{", " if line else ""}"{CHECK}": "{before}"}}\n')
    return "".join(parts).encode(), before


def read_lines(path: Path, size: int = SHORT) -> tuple[list[Line], list[str]]:
    """(lines, the checksum of each); a last line that was cut short is left out.

    Raises:
        CheckpointError: A line is not as it was written.
    """
    lines, checks, before = list[Line](), list[str](), ""
    *raw, _ = path.read_bytes().split(b"\n")
    for number, text in enumerate(raw, 1):
        line, check = _read_line(text, before, size)
        if line is None:
            raise CheckpointError(
                f"line {number} of {str(path)!r} is damaged; delete the folder and run again"
            )
        lines.append(line)
        checks.append(check)
        before = check
    return lines, checks


def read_until(path: Path, check: str, size: int = SHORT) -> list[Line]:
    """The lines up to the one with this checksum, which a checkpoint holds; none where it holds no checksum."""
    if not check:
        return []
    lines, checks = read_lines(path, size) if path.exists() else ([], [])
    if check not in checks:
        raise CheckpointError(
            f"{str(path)!r} is missing or of another run; put it back, or start the run again"
        )
    return lines[: checks.index(check) + 1]


def undamaged(path: Path, size: int = SHORT) -> list[Line]:
    """The lines of a file that are as they were written, whatever happened to the others."""
    found, before = list[Line](), ""
    for text in path.read_bytes().split(b"\n") if path.exists() else ():
        line, check = _read_line(text, before, size)
        if line is not None:
            found.append(line)
        before = check
    return found


def _read_line(text: bytes, before: str, size: int = SHORT) -> tuple[Line | None, str]:
    """(a line, None where it is damaged; its checksum)."""
    check = ""
    try:
        line = dict(json.loads(text))
        check = str(line.pop(CHECK))
        return line if check == digest(before + json.dumps(line), size=size) else None, check
    except (ValueError, TypeError, KeyError, RecursionError):
        return None, check
