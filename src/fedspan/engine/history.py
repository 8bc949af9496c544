"""Evaluations on disk: one JSON object per line. The first line has the spec and versions, every other one a row.

A line is written in one piece and has a checksum. After a crash the last line may be cut short: it is dropped on
reading. A line that was changed is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedspan.core.errors import CheckpointError, shown
from fedspan.core.files import append, make_dir, sync, write_atomic
from fedspan.core.sealed import REMEDY, SHORT, check_form, fits, lines_text, read_lines, undamaged
from fedspan.engine.loop import Line, Row

NAME = "history.jsonl"
SPEC = {  # of what others read in it
    "seed": int, "rounds": int, "metrics": list[Any], "method": dict[str, Any], "task": dict[str, Any],
    "participation": dict[str, Any],
}  # fmt: skip
COSTS = {"round": int, "up_bytes": int, "down_bytes": int, "seconds": float}  # of a row
ASIDE = {"events": list[str], "diverged": bool}


def line_of(row: Row, run: int) -> Line:
    """One run's part of a row; numbers that are not finite become null."""
    line: Line = {
        "round": row.round,
        "up_bytes": int(row.up_bytes[run]),
        "down_bytes": int(row.down_bytes[run]),
        "seconds": round(row.seconds, 4),
    }
    for name, values in row.metrics.items():
        value = float(values[run])
        line[name] = value if math.isfinite(value) else None
    if row.events:
        line["events"] = list(row.events)
    return line | {"diverged": True} if row.diverged[run] else line


class Mark(NamedTuple):
    """A history at the time of a checkpoint."""

    rows: int
    checksum: str  # of these rows, whatever line one is


def mark_of(told: list[Any], where: Path) -> Mark:
    """A mark as a checkpoint holds it."""
    if (
        not fits(told, list[int | str])
        or [type(part) for part in told] != [int, str]
        or told[0] < 0
    ):
        raise CheckpointError(
            f"{str(where)!r} is damaged: it marks a history by {shown(told)}; {REMEDY}"
        )
    return Mark(*told)


class Lines:
    """A file of lines that is being written."""

    def __init__(
        self, path: Path, lines: Iterable[Line] = (), size: int = SHORT, private: bool = False
    ) -> None:
        self.path, self.size = path, size
        make_dir(path.parent)
        text, self.check = lines_text(
            lines, size=size
        )  # of the last line, which stands for the file up to there
        write_atomic(path, text, private=private)

    def append(self, *lines: Line) -> None:
        """Adds lines in one piece."""
        text, check = lines_text(lines, self.check, self.size)
        append(self.path, text)
        self.check = check


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


class History:
    """A history file that is being written. A checkpoint holds its mark and not the rows, however many there are."""

    def __init__(self, path: Path, header: Line, rows: list[Line]) -> None:
        self.lines, self.rows, self.digest = Lines(path, [header, *rows]), len(rows), _digest(rows)
        self.ended = any(row.get("diverged") for row in rows)

    def append(self, line: Line) -> None:
        """Add a row; a run that has diverged gets no more."""
        if not self.ended:
            self.lines.append(line)
            self.digest.update(_text(line))
            self.rows += 1
        self.ended = self.ended or bool(line.get("diverged"))

    def mark(self) -> Mark:
        """The rows so far, which are on disk."""
        sync(self.lines.path)
        return Mark(self.rows, self.digest.hexdigest())


def read_marked(path: Path, mark: Mark) -> list[Line]:
    """The rows of a history up to a mark; what a crash has left after them does not matter."""
    rows = undamaged(path)[1 : mark.rows + 1]
    if len(rows) < mark.rows or _digest(rows).hexdigest() != mark.checksum:
        raise CheckpointError(
            f"{str(path)!r} is missing or damaged; put it back, or start the run again"
        )
    _check_rows(rows, path)
    return rows


def read(path: Path) -> tuple[Line, list[Line]]:
    """(line one, rows) of a history file."""
    if not path.is_file():
        raise CheckpointError(f"no history at {str(path)!r}")
    lines, _ = read_lines(path)
    if not lines or "spec" not in lines[0]:
        raise CheckpointError(
            f"{str(path)!r} does not begin with a spec; it is not a fedspan history"
        )
    spec = check_form(lines[0], path, {"spec": dict[str, Any]}, {"seed": int})["spec"]
    check_form(spec, path, {}, SPEC)
    for key in ("method", "task"):
        check_form(spec.get(key, {"name": ""}), path, {"name": str})
    check_form(spec.get("participation", {"weights": ""}), path, {"weights": str})
    if not _plain(spec):
        raise CheckpointError(
            f"{str(path)!r} is damaged: its spec holds null, NaN or infinity; {REMEDY}"
        )
    _check_rows(lines[1:], path)
    return lines[0], lines[1:]


def _check_rows(rows: Sequence[Line], path: Path) -> None:
    """Refuses rows that no run could have written."""
    before = {"round": -1, "up_bytes": 0, "down_bytes": 0}
    for row in rows:
        check_form(row, path, COSTS, dict.fromkeys(row, float | None) | ASIDE)
        least = {key: value + (key == "round") for key, value in before.items()}
        if wrong := [key for key in before if row[key] < least[key]]:
            raise CheckpointError(
                f"{str(path)!r} is damaged: {wrong[0]!r} falls to {row[wrong[0]]}; {REMEDY}"
            )
        before = {key: row[key] for key in before}


def _plain(value: Any) -> bool:
    """Whether a spec holds values that it could be made of."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return fits(value, float | str | bool | dict[str, Any] | list[Any]) and all(map(_plain, inner))


class Rounds:
    """One JSON object per round, for whoever watches a run across machines."""

    def __init__(self, path: Path, private: bool = False) -> None:
        self.path, self.private = path, private

    def begin(self, check: str) -> list[str]:
        """Drops what is later than the checkpoint, which holds the checksum of its last line; gives what went wrong.

        The file decides no number of the run, so that a damaged one does not end it.
        """
        try:
            lines, events = read_until(self.path, check), list[str]()
        except CheckpointError as error:
            lines, events = self.read(), [f"{error}; the rounds in it that are undamaged are kept"]
        self.lines = Lines(self.path, lines, private=self.private)
        return events

    def append(self, line: Line) -> str:
        """Adds a round; gives the checksum of its line."""
        self.lines.append(line)
        return self.lines.check

    def read(self) -> list[Line]:
        """All rounds there are; what is cut short or damaged is left out."""
        return [line for line in undamaged(self.path) if isinstance(line.get("round"), int)]


def write(path: Path, lines: list[Line]) -> None:
    """A whole history at once."""
    Lines(path, lines)


def _digest(rows: Iterable[Line]) -> hashlib.blake2b:
    return hashlib.blake2b(b"".join(map(_text, rows)), digest_size=16)


def _text(row: Line) -> bytes:
    return json.dumps(row).encode()
