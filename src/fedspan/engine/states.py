"""Where the states of all clients live in one process: in memory, or in files of which only the cohort's rows are read.

A state is a row of numbers; `take` and `put` move the rows of a cohort. On disk a row is read and written by its place
in a sparse file, so that neither the memory of this process nor, until a client takes part, the disk holds it.

A killed run resumes to the same bits: before a row is first changed after a checkpoint, what it was is noted in that
checkpoint's journal. Loading a checkpoint undoes the notes of its own journal and of any later one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from fedspan.core.errors import CheckpointError, SpecError

Rows = npt.NDArray[np.int64]
STORED = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class States(Protocol):
    """Rows of one field of all clients' states."""

    def take(self, rows: Rows) -> torch.Tensor:
        """A copy of these rows, (len(rows), size)."""

    def put(self, rows: Rows, values: torch.Tensor) -> None:
        """Overwrite these rows."""

    def every(self) -> torch.Tensor:
        """All rows."""

    def save(self) -> torch.Tensor:
        """What a checkpoint must hold to come back to this moment."""

    def load(self, saved: torch.Tensor) -> None:
        """Come back to the moment of a `save`."""


class InMemory:
    """All rows in one tensor."""

    def __init__(self, first: torch.Tensor, count: int) -> None:
        self.all = first.expand(count, -1).clone()

    def take(self, rows: Rows) -> torch.Tensor:
        """Rows by number."""
        return self.all.index_select(0, torch.from_numpy(rows))

    def put(self, rows: Rows, values: torch.Tensor) -> None:
        """Rows by number."""
        self.all.index_copy_(0, torch.from_numpy(rows), values)

    def every(self) -> torch.Tensor:
        """All rows."""
        return self.all

    def save(self) -> torch.Tensor:
        """All rows."""
        return self.all

    def load(self, saved: torch.Tensor) -> None:
        """All rows."""
        self.all.copy_(saved)


class OnDisk:
    """Rows in a sparse file; a checkpoint holds the number of the journal that leads back to it."""

    def __init__(self, path: Path, first: torch.Tensor, count: int, dtype: torch.dtype, *, resume: bool) -> None:
        if path.exists() and not resume:
            raise SpecError(f"{str(path)!r} holds states of an earlier run; resume that run, or name another folder")
        if first.any():
            raise SpecError("states on disk start at zero, and this method's do not; keep them in memory")
        self.path, self.count, self.size, self.dtype, self.kind = path, count, first.shape[-1], dtype, first.dtype
        self.bytes = self.size * torch.empty(0, dtype=dtype).element_size()
        path.parent.mkdir(parents=True, exist_ok=True)
        about, shape = path.with_suffix(".json"), {"rows": count, "size": self.size, "dtype": str(dtype)}
        if about.exists() and json.loads(about.read_text()) != shape:
            raise CheckpointError(
                f"{str(path)!r} holds states of another run ({about.read_text()}); name another folder"
            )
        about.write_text(json.dumps(shape))
        self.file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self.file, count * self.bytes)
        self.number, self.noted = max([0, *self._journals()]), set[int]()
        self.journal = self._open(self.number)

    def take(self, rows: Rows) -> torch.Tensor:
        """Read rows by their place."""
        return torch.stack([self._read(row) for row in rows.tolist()])

    def put(self, rows: Rows, values: torch.Tensor) -> None:
        """Write rows in place, after noting what they were."""
        for row, value in zip(rows.tolist(), values, strict=True):
            if row not in self.noted:
                self.noted.add(row)
                os.write(self.journal, row.to_bytes(8, "little") + os.pread(self.file, self.bytes, row * self.bytes))
            os.pwrite(self.file, _raw(value.to(self.dtype)), row * self.bytes)

    def every(self) -> torch.Tensor:
        """All rows, in memory: for inspection of small populations."""
        return self.take(np.arange(self.count))

    def save(self) -> torch.Tensor:
        """Begin a new journal; the one before is kept until the checkpoint that names this one is surely written."""
        os.fsync(self.file)
        os.close(self.journal)
        for old in self._journals():
            if old < self.number:
                self._place(old).unlink()
        self.number += 1
        self.journal = self._open(self.number)
        self.noted.clear()
        return torch.tensor([self.number])

    def load(self, saved: torch.Tensor) -> None:
        """Undo all notes since the save, the latest first."""
        wanted = int(saved)
        for number in sorted(self._journals(), reverse=True):
            if number >= wanted:
                for row, old in reversed(list(self._notes(number))):
                    os.pwrite(self.file, old, row * self.bytes)
                os.fsync(self.file)
                self._place(number).unlink()
        os.close(self.journal)
        self.number, self.journal = wanted, self._open(wanted)
        self.noted.clear()

    def _journals(self) -> list[int]:
        return [int(file.name.rsplit("-", 1)[1]) for file in self.path.parent.glob(f"{self.path.stem}.journal-*")]

    def _place(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.stem}.journal-{number}")

    def _open(self, number: int) -> int:
        return os.open(self._place(number), os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)

    def _notes(self, number: int) -> Iterator[tuple[int, bytes]]:
        """(row, what it was). A note that a crash cut short was never followed by a change of its row."""
        length = 8 + self.bytes
        with self._place(number).open("rb") as file:
            while len(note := file.read(length)) == length:
                yield int.from_bytes(note[:8], "little"), note[8:]

    def _read(self, row: int) -> torch.Tensor:
        raw = bytearray(os.pread(self.file, self.bytes, row * self.bytes))
        return torch.frombuffer(raw, dtype=self.dtype).to(self.kind)


def _raw(value: torch.Tensor) -> bytes:
    return value.contiguous().view(torch.uint8).numpy().tobytes()
