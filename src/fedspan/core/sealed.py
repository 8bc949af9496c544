"""Small files that a run reads back: JSON with checksums, so that damage is refused and never read as a result.

A table has its own checksum. In a file of lines every line has one that continues that of the line before, so that the
checksum of a line stands for the whole file up to there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedspan.core.errors import CheckpointError
from fedspan.core.files import write_atomic

Line = dict[str, Any]
CHECK = "checksum"  # the last key of a table or line
SHORT, LONG = 6, 32  # bytes of a checksum: against damage, and against somebody who looks for another text with it


def write_table(path: Path, table: Mapping[str, Any], *, private: bool = False) -> None:
    """Writes a small table."""
    write_atomic(path, table_text(table), private=private)


def table_text(table: Mapping[str, Any]) -> bytes:
    """The text of a small table."""
    return (json.dumps({**table, CHECK: _digest(json.dumps(table))}, indent=1) + "\n").encode()


def read_table(path: Path, remedy: str = "put it back, or run again in another directory", **fields: type) -> Line:
    """Reads what `write_table` wrote; CheckpointError with a remedy where it is damaged, or has not these fields."""
    try:
        table = dict(json.loads(path.read_bytes()))
        check = table.pop(CHECK)
    except (ValueError, TypeError, KeyError, RecursionError):
        check = None
    if check is None or check != _digest(json.dumps(table)):
        raise CheckpointError(f"{str(path)!r} is damaged; {remedy}")
    for name, kind in fields.items():
        if not isinstance(table.get(name), kind):
            raise CheckpointError(f"{str(path)!r} has no {name!r} as fedspan writes it; {remedy}")
    return table


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
