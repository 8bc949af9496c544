"""Small files that a run reads back: JSON with checksums, so that damage is refused and never read as a result.

A table has its own checksum. In a file of lines every line has one that continues that of the line before, so that the
checksum of a line stands for the whole file up to there.
"""

from __future__ import annotations

import hashlib
import json
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedspan.core.errors import CheckpointError, shown
from fedspan.core.files import write_atomic

Line = dict[str, Any]
CHECK = "checksum"  # the last key of a table or line
REMEDY = "put it back, or run again in another directory"
SHORT, LONG = 6, 32  # bytes of a checksum: against damage, and against somebody who looks for another text with it


def write_table(path: Path, table: Mapping[str, Any], *, private: bool = False) -> None:
    """Writes a small table."""
    text = json.dumps({**table, CHECK: _digest(json.dumps(table))}, indent=1) + "\n"
    write_atomic(path, text.encode(), private=private)


def read_table(path: Path, remedy: str = REMEDY) -> Line:
    """Reads what `write_table` wrote; CheckpointError with a remedy where it is damaged."""
    try:
        table = dict(json.loads(path.read_bytes()))
        check = table.pop(CHECK)
    except (ValueError, TypeError, KeyError, RecursionError):
        check = None
    if check is None or check != _digest(json.dumps(table)):
        raise CheckpointError(f"{str(path)!r} is damaged; {remedy}")
    return table


def check_form(table: Any, form: Mapping[str, Any], where: object, optional: Mapping[str, Any] | None = None) -> None:
    """Refuses a table whose values are of other types than `form` has for their keys; other keys may be anything.

    Args:
        table: What was read, whose checksum is right.
        form: Key → type of a value that must be there, such as `int`, `list[str]` or `dict[str, float | None]`.
        where: The file, for the error.
        optional: The same of keys that may be missing.
    """
    if not isinstance(table, dict):
        raise CheckpointError(f"{str(where)!r} is damaged: it holds {shown(table)}; {REMEDY}")
    for key, hint in {**form, **{key: hint for key, hint in (optional or {}).items() if key in table}}.items():
        if key not in table:
            raise CheckpointError(f"{str(where)!r} is damaged: it has no {key!r}; {REMEDY}")
        if not fits(table[key], hint):
            raise CheckpointError(f"{str(where)!r} is damaged: {key!r} is {shown(table[key])}; {REMEDY}")


def fits(value: Any, hint: Any) -> bool:
    """Whether a value of JSON is of a type; a whole number is a `float` too, and True no number."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        return isinstance(value, list) and all(fits(one, inner[0]) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(one, inner[1]) for one in value.values())
    if origin is types.UnionType:
        return any(fits(value, one) for one in inner)
    if hint is float:
        return type(value) in (int, float)
    return hint is Any or type(value) is (type(None) if hint is None else hint)


def lines_text(lines: Iterable[Mapping[str, Any]], before: str = "", size: int = SHORT) -> tuple[bytes, str]:
    """(the text of lines, the checksum of the last one) after a line with checksum `before`."""
    parts = []
    for line in lines:
        text = json.dumps(line, allow_nan=False)
        before = _digest(before + text, size)
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
        line, check = _read_line(text)
        if line is None or check != _digest(before + json.dumps(line), size):
            raise CheckpointError(f"line {number} of {str(path)!r} is damaged; delete the folder and run again")
        lines.append(line)
        checks.append(check)
        before = check
    return lines, checks


def undamaged(path: Path) -> list[Line]:
    """The lines of a file that are as they were written, whatever happened to the others."""
    found, before = list[Line](), ""
    for text in path.read_bytes().split(b"\n") if path.exists() else ():
        line, check = _read_line(text)
        if line is not None and check == _digest(before + json.dumps(line)):
            found.append(line)
        before = check
    return found


def _read_line(text: bytes) -> tuple[Line | None, str]:
    try:
        line = dict(json.loads(text))
        return line, str(line.pop(CHECK))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None, ""


def _digest(text: str, size: int = SHORT) -> str:
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()
