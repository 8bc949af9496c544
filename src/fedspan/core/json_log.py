"""Small files that a run reads back: JSON with checksums, so that damage is refused and never read as a result.

A table has its own checksum. In a file of lines every line has one that continues that of the line before, so that the
checksum of a line stands for the whole file up to there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

from fedspan.core.digest import digest
from fedspan.core.errors import CheckpointError, shown
from fedspan.core.files import append, make_dir, write_atomic

Line = dict[str, Any]
Form = Mapping[str, Any]  # key → type
NO_FORM: Form = {}
DEEPEST = 50  # lists and tables in one another
CHECK = "checksum"  # the last key of a table or line
REMEDY = "put it back, or run again in another directory"
SIZE = 32  # bytes of a checksum, which nobody can find another text for


def write_table(path: Path, table: Mapping[str, Any], *, private: bool = False) -> None:
    """Writes a small table."""
    whole = {**table, CHECK: digest(json.dumps(table), size=SIZE)}
    write_atomic(path, (json.dumps(whole, indent=1) + "\n").encode(), private=private)


def read_table(
    path: Path, form: Form = NO_FORM, more: Form = NO_FORM, remedy: str = REMEDY
) -> Line:
    """Reads what `write_table` wrote; CheckpointError with a remedy where it is damaged, or not of its form."""
    table, _ = _parsed(path.read_bytes(), f"{str(path)!r} is damaged; {remedy}")
    return check_form(table, path, form, more, remedy)


def _parsed(text: bytes, damaged: str, before: str = "") -> tuple[Line, str]:
    """Return a table or line and its checksum; `damaged` is the error where the checksum is another one."""
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        table = dict(json.loads(text))
        if (check := table.pop(CHECK)) == digest(before + json.dumps(table), size=SIZE):
            return table, check
    raise CheckpointError(damaged)


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
    damaged = f"{str(where)!r} is damaged"
    if not isinstance(table, dict):
        raise CheckpointError(f"{damaged}: it holds {shown(table)}; {remedy}")
    for key, hint in {**more, **form}.items():
        if key not in table and key in form:
            raise CheckpointError(f"{damaged}: it has no {key!r}; {remedy}")
        if key in table and not fits(table[key], hint):
            raise CheckpointError(f"{damaged}: {key!r} is {shown(table[key])}; {remedy}")
    return table


def fits(value: Any, hint: Any) -> bool:
    """Whether a value of JSON is of a type; numbers are finite, a whole one is a `float` too, and True is none."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (list, dict):
        members = value.values() if isinstance(value, dict) else value
        return isinstance(value, origin) and all(fits(one, inner[-1]) for one in members)
    if origin is UnionType:
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
    """A file of lines that is being written; the checksum of the last line stands for all of them.

    Args:
        path: The file.
        lines: What it holds from the beginning.
        checks: Name of a file → the checksum of its last line, which is kept up to date.
        name: That of this file.
        private: Only the owner may read it.
    """

    def __init__(
        self,
        path: Path,
        lines: Iterable[Line] = (),
        checks: dict[str, str] | None = None,
        name: str = "",
        private: bool = False,
    ) -> None:
        self.path, self.name, self.checks = path, name, {} if checks is None else checks
        make_dir(path.parent)
        text, self.checks[name] = lines_text(lines)
        write_atomic(path, text, private=private)

    def append(self, *lines: Line) -> None:
        """Adds lines in one piece."""
        text, check = lines_text(lines, self.checks[self.name])
        append(self.path, text)
        self.checks[self.name] = check


def lines_text(lines: Iterable[Mapping[str, Any]], before: str = "") -> tuple[bytes, str]:
    """(the text of lines, the checksum of the last one) after a line with checksum `before`."""
    parts = []
    for line in lines:
        text = json.dumps(line, allow_nan=False)
        before = digest(before + text, size=SIZE)
        parts.append(f'{text[:-1]}{", " if line else ""}"{CHECK}": "{before}"}}\n')
    return "".join(parts).encode(), before


def read_lines(path: Path, until: str | None = None) -> tuple[list[Line], list[str]]:
    """(lines, the checksum of each); a last line that was cut short is left out.

    Args:
        path: The file.
        until: The checksum of the last line to read, as a checkpoint holds it; "" for none. By default all are read.

    Raises:
        CheckpointError: A line is not as it was written, or there is none with this checksum.
    """
    lines, checks, before = list[Line](), list[str](), ""
    raw = path.read_bytes().split(b"\n")[:-1] if until is None or path.exists() else []
    for number, text in enumerate(raw, 1):
        if before == until:
            break
        damaged = f"line {number} of {str(path)!r} is damaged; delete the folder and run again"
        line, before = _parsed(text, damaged, before)
        lines.append(line)
        checks.append(before)
    if until not in (None, before):
        raise CheckpointError(
            f"{str(path)!r} is missing or of another run; put it back, or start the run again"
        )
    return lines, checks
