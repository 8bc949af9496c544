"""The states of all clients of a simulation, in memory or in files of which only the cohort's rows are read.

Each field of a client state is a table with one row per client and run; `take` and `put` move the rows of a cohort. On
disk the table is a sparse file, so a client that never took part uses neither memory nor disk space.

A killed run resumes to the same bits. Before a row first changes after a checkpoint, its old value is written to the
journal of that checkpoint. Loading a checkpoint undoes its own journal and all later ones.
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
    """One field of all clients' states."""

    def take(self, rows: Rows) -> torch.Tensor:
        """Copy rows: (len(rows), size)."""

    def put(self, rows: Rows, values: torch.Tensor) -> None:
        """Overwrite rows."""

    def take_all(self) -> torch.Tensor:
        """All rows, in memory; for small populations."""

    def save(self) -> torch.Tensor:
        """What a checkpoint must hold to return to this moment."""

    def load(self, saved: torch.Tensor) -> None:
        """Return to the moment of a `save`."""


class InMemory:
    """All rows in one tensor."""

    def __init__(self, first: torch.Tensor, count: int) -> None:
        self.values = first.expand(count, -1).clone()

    def take(self, rows: Rows) -> torch.Tensor:
        return self.values.index_select(0, torch.from_numpy(rows))

    def put(self, rows: Rows, values: torch.Tensor) -> None:
        self.values.index_copy_(0, torch.from_numpy(rows), values)

    def take_all(self) -> torch.Tensor:
        return self.values

    def save(self) -> torch.Tensor:
        return self.values

    def load(self, saved: torch.Tensor) -> None:
        self.values.copy_(saved)


class OnDisk:
    """Rows in a sparse file. A checkpoint holds only the number of the journal that leads back to it."""

    def __init__(self, path: Path, first: torch.Tensor, count: int, stored: torch.dtype, *, resume: bool) -> None:
        if path.exists() and not resume:
            raise SpecError(
                f"{str(path)!r} holds states of an earlier run; resume that run or choose another directory"
            )
        if first.any():
            raise SpecError("states on disk start at zero, but those of this method do not; keep them in memory")
        self.path, self.count, self.stored, self.dtype = path, count, stored, first.dtype
        self.row_bytes = first.shape[-1] * stored.itemsize
        path.parent.mkdir(parents=True, exist_ok=True)
        about, shape = path.with_suffix(".json"), {"rows": count, "size": first.shape[-1], "dtype": str(stored)}
        if about.exists() and json.loads(about.read_text()) != shape:
            raise CheckpointError(
                f"{str(path)!r} holds states of another run ({about.read_text()}); choose another directory"
            )
        about.write_text(json.dumps(shape))
        self.file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self.file, count * self.row_bytes)
        self._open_journal(max([0, *self._journals()]))

    def take(self, rows: Rows) -> torch.Tensor:
        return torch.stack([self._read(row) for row in rows.tolist()])

    def put(self, rows: Rows, values: torch.Tensor) -> None:
        for row, value in zip(rows.tolist(), values, strict=True):
            start = row * self.row_bytes
            if row not in self.journaled:
                self.journaled.add(row)
                os.write(self.journal, row.to_bytes(8, "little") + os.pread(self.file, self.row_bytes, start))
            raw = value.to(self.stored).contiguous().view(torch.uint8).numpy().tobytes()
            os.pwrite(self.file, raw, start)

    def take_all(self) -> torch.Tensor:
        return self.take(np.arange(self.count))

    def save(self) -> torch.Tensor:
        """Start a new journal; the previous one stays until the checkpoint that names the new one is on disk."""
        os.fsync(self.file)
        os.close(self.journal)
        for number in self._journals():
            if number < self.number:
                self._journal_path(number).unlink()
        self._open_journal(self.number + 1)
        return torch.tensor([self.number])

    def load(self, saved: torch.Tensor) -> None:
        """Undo all journals since the save, the latest first."""
        for number in sorted(self._journals(), reverse=True):
            if number >= int(saved):
                for row, old in reversed(list(self._read_journal(number))):
                    os.pwrite(self.file, old, row * self.row_bytes)
                os.fsync(self.file)
                self._journal_path(number).unlink()
        os.close(self.journal)
        self._open_journal(int(saved))

    def _journals(self) -> list[int]:
        return [int(file.name.rsplit("-", 1)[1]) for file in self.path.parent.glob(f"{self.path.stem}.journal-*")]

    def _journal_path(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.stem}.journal-{number}")

    def _open_journal(self, number: int) -> None:
        self.number, self.journaled = number, set[int]()
        self.journal = os.open(self._journal_path(number), os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)

    def _read_journal(self, number: int) -> Iterator[tuple[int, bytes]]:
        """(row, old value). An entry that a crash cut short was never followed by a change of its row."""
        length = 8 + self.row_bytes
        with self._journal_path(number).open("rb") as file:
            while len(entry := file.read(length)) == length:
                yield int.from_bytes(entry[:8], "little"), entry[8:]

    def _read(self, row: int) -> torch.Tensor:
        raw = bytearray(os.pread(self.file, self.row_bytes, row * self.row_bytes))
        return torch.frombuffer(raw, dtype=self.stored).to(self.dtype)
