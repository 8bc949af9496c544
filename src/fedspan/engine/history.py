"""Evaluations on disk: one JSON object per line. The first line has the spec and versions, every other one a row.

A line is written in one piece and has a checksum. After a crash the last line may be cut short: it is dropped on
reading. A line that was changed is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from fedspan.core.errors import CheckpointError
from fedspan.core.files import append, make_dir, sync, write_atomic
from fedspan.core.sealed import SHORT, lines_text, read_lines, undamaged
from fedspan.engine.loop import Line, Row

NAME = "history.jsonl"


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


class Lines:
    """A file of lines that is being written."""

    def __init__(self, path: Path, lines: Iterable[Line] = (), size: int = SHORT, private: bool = False) -> None:
        self.path, self.size = path, size
        make_dir(path.parent)
        text, self.check = lines_text(lines, size=size)  # of the last line, which stands for the file up to there
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
        raise CheckpointError(f"{str(path)!r} is missing or of another run; put it back, or start the run again")
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
        raise CheckpointError(f"{str(path)!r} is missing or damaged; put it back, or start the run again")
    return rows


def read(path: Path) -> tuple[Line, list[Line]]:
    """(line one, rows) of a history file."""
    if not path.is_file():
        raise CheckpointError(f"no history at {str(path)!r}")
    lines, _ = read_lines(path)
    if not lines or not isinstance(lines[0].get("spec"), dict):
        raise CheckpointError(f"{str(path)!r} does not begin with a spec; it is not a fedspan history")
    before = -1
    for number, row in enumerate(lines[1:], 2):
        if not _is_row(row) or row["round"] <= before:
            raise CheckpointError(f"line {number} of {str(path)!r} is no evaluation; delete the folder and run again")
        before = row["round"]
    return lines[0], lines[1:]


def _is_whole(value: Any) -> bool:
    return type(value) is int and abs(value) < 1 << 63


def _is_row(line: Line) -> bool:
    """Whether a line has the numbers of an evaluation; one with a right checksum may still be somebody else's."""
    whole = all(_is_whole(line.get(name)) for name in ("round", "up_bytes", "down_bytes"))
    numbers = [value for name, value in line.items() if name not in ("events", "diverged")]
    texts = line.get("events", [])
    return (
        whole
        and "seconds" in line
        and all(value is None or type(value) is float or _is_whole(value) for value in numbers)
        and isinstance(texts, list)
        and all(isinstance(text, str) for text in texts)
    )


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
