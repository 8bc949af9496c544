"""Evaluations on disk: one JSON object per line. The first line has the spec and versions, every other one a row.

A line is written in one piece and flushed. After a crash the last line may be cut short: it is dropped on reading.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from pathlib import Path
from typing import NamedTuple

from fedspan.core.errors import CheckpointError
from fedspan.core.files import append, make_dir, sync, write_atomic
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
    checksum: str  # of these rows as they are in the file


class History:
    """A history file that is being written. A checkpoint holds its mark and not the rows, however many there are."""

    def __init__(self, path: Path, header: Line, rows: list[Line]) -> None:
        self.path, self.rows, self.digest = path, len(rows), _digest(_text(rows))
        make_dir(path.parent)
        write(path, [header, *rows])
        self.ended = any(row.get("diverged") for row in rows)

    def append(self, line: Line) -> None:
        """Add a row; a run that has diverged gets no more."""
        if not self.ended:
            text = _text([line])
            append(self.path, text)
            self.digest.update(text)
            self.rows += 1
        self.ended = self.ended or bool(line.get("diverged"))

    def mark(self) -> Mark:
        """The rows so far, which are on disk."""
        sync(self.path)
        return Mark(self.rows, self.digest.hexdigest())


def read_marked(path: Path, mark: Mark) -> list[Line]:
    """The rows of a history up to a mark; what a crash has left after them does not matter."""
    texts = path.read_bytes().split(b"\n")[1 : mark.rows + 1] if path.is_file() else []
    raw = b"".join(text + b"\n" for text in texts)
    if _digest(raw).hexdigest() != mark.checksum:
        raise CheckpointError(f"{str(path)!r} is missing or damaged; put it back, or start the run again")
    return [json.loads(text) for text in texts]


def read(path: Path) -> tuple[Line, list[Line]]:
    """(line one, rows) of a history file."""
    if not path.is_file():
        raise CheckpointError(f"no history at {str(path)!r}")
    lines: list[Line] = []
    raw = path.read_bytes().split(b"\n")
    for number, text in enumerate(raw):
        try:
            lines += [json.loads(text)] if text else []
        except ValueError:
            if number < len(raw) - 1:
                raise CheckpointError(
                    f"line {number + 1} of {str(path)!r} is not JSON; delete the folder and run again"
                ) from None
    if not lines or "spec" not in lines[0]:
        raise CheckpointError(f"{str(path)!r} does not begin with a spec; it is not a fedspan history")
    return lines[0], lines[1:]


class Rounds:
    """One JSON object a round, for whoever watches a run across machines."""

    def __init__(self, path: Path) -> None:
        self.path, self.begun = path, False

    def append(self, line: Line) -> None:
        """Add a round; the first one added drops what an earlier, interrupted run wrote of it and of later ones."""
        if not self.begun and self.path.exists():
            write(self.path, [one for one in self.read() if one["round"] < line["round"]])
        self.begun = True
        append(self.path, _text([line]))

    def read(self) -> list[Line]:
        """All rounds there are; what is cut short or damaged is left out."""
        lines = []
        for text in self.path.read_bytes().split(b"\n"):
            with contextlib.suppress(ValueError):
                lines.append(json.loads(text))
        return [line for line in lines if isinstance(line, dict) and isinstance(line.get("round"), int)]


def write(path: Path, lines: list[Line]) -> None:
    """A whole history at once."""
    write_atomic(path, _text(lines))


def _digest(raw: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(raw, digest_size=16)


def _text(lines: list[Line]) -> bytes:
    return "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines).encode()
