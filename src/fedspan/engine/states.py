"""The states of all clients, in memory or in files of which only the cohort's rows are read.

Each field of a client state is a table with one row per client and run; `take` and `put` move the rows of a cohort, so
that a round costs what its clients do and not what all of them do. No client's copy of x is stored: it equals the
server's x of an earlier round. On disk the table is a sparse file, so a client that never took part uses neither memory
nor disk space.

A killed run resumes to the same bits. Before a row first changes after a checkpoint, its old value is written to the
journal of that checkpoint. Loading a checkpoint undoes its own journal and all later ones.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedspan.core import system
from fedspan.core.errors import CheckpointError, SpecError
from fedspan.core.files import disk_errors, make_dir, read_at, remove, write_at, write_atomic
from fedspan.core.layout import Vector
from fedspan.core.wire import Arrays, check_forms

Rows = npt.NDArray[np.int64]
LARGE = 1 << 22  # numbers of a state that is not copied to be read
COPIED = 1 << 20  # bytes of a row that are copied to the journal at once


class ClientStates:
    """The states of all clients: one table of rows per field, in memory or in files of a folder.

    Args:
        first: The state that every client begins with, (1, 1, size) each.
        count: Number of rows.
        folder: Where the files are; None keeps rows in memory.
        resume: Whether the folder holds the files of an earlier process.
        own: Whether it is the run's own: what is there without a checkpoint is of no use to anyone.
        without: Fields that are not kept, and stay as they are at first.
    """

    def __init__(
        self,
        first: Any,
        count: int,
        folder: Path | None = None,
        *,
        resume: bool = False,
        own: bool = False,
        without: Collection[str] = (),
    ) -> None:
        self.kind, self.tables, self.fixed = type(first), dict[str, Table](), dict[str, Vector]()
        for name, part in vars(first).items():
            if not part.numel() or name in without:
                self.fixed[name] = part[0]
            elif folder is None:
                self.tables[name] = InMemory(part[0], count)
            else:
                path = folder / f"{name}.states"
                self.tables[name] = OnDisk(path, part[0], count, resume=resume, own=own)
        self._fixed: dict[tuple[int, ...], dict[str, Vector]] = {}  # for so many runs and clients

    def take(self, rows: Rows, shape: tuple[int, ...]) -> Any:
        """The states of rows, (runs, clients, size), to be read before the next `put`."""
        parts = {name: table.take(rows).view(*shape, -1) for name, table in self.tables.items()}
        return self._state(parts, shape)

    def take_all(self, shape: tuple[int, ...]) -> Any:
        """The states of all rows, in memory; for small populations."""
        parts = {name: table.take_all().view(*shape, -1) for name, table in self.tables.items()}
        return self._state(parts, shape)

    def _state(self, parts: dict[str, Vector], shape: tuple[int, ...]) -> Any:
        if (fixed := self._fixed.get(shape)) is None:
            fixed = {name: part.expand(*shape, -1) for name, part in self.fixed.items()}
            self._fixed[shape] = fixed
        return self.kind(**parts, **fixed)

    def put(self, rows: Rows, states: Any) -> None:
        """Overwrite the states of rows."""
        for name, table in self.tables.items():
            table.put(rows, getattr(states, name).flatten(0, 1))

    def restart(self, rows: Rows) -> bool:
        """Whether rows got their first states: what was overwritten in memory is lost."""
        lost = [table for table in self.tables.values() if isinstance(table, InMemory)]
        for table in lost:
            table.put(rows, table.first.expand(len(rows), -1))
        return bool(lost)

    def save(self) -> Arrays:
        """What a checkpoint must hold to return to this moment: a few arrays, however many clients there are."""
        return {
            f"{name}.{part}": array
            for name, table in self.tables.items()
            for part, array in table.save().items()
        }

    def saved(self) -> None:
        """The checkpoint with what `save` gave is on disk."""
        for table in self.tables.values():
            table.saved()

    def load(self, saved: Arrays) -> None:
        """Return to the moment of a `save`; other arrays are left alone."""
        for name, table in self.tables.items():
            own = (key for key in saved if key.startswith(f"{name}."))
            table.load({key.removeprefix(f"{name}."): saved[key] for key in own})

    def close(self) -> None:
        """Close the files, if any, so that they can be deleted on every system."""
        for table in self.tables.values():
            table.close()


def check_rows(rows: torch.Tensor, count: int, most: int) -> None:
    """Refuses numbers of rows that are out of range, there twice, or not as many as what was saved of them."""
    if (
        len(rows) != count
        or len(rows.unique()) < count
        or (count and not 0 <= int(rows.min()) <= int(rows.max()) < most)
    ):
        raise CheckpointError(
            "the checkpoint is damaged: its rows of clients are impossible; start the run again"
        )


class InMemory:
    """The rows of the clients that took part, one after the other in the order in which they first did.

    Memory is reserved for all rows, but the system provides it only for those that are written.
    """

    def __init__(self, first: torch.Tensor, count: int) -> None:
        self.first, self.count, self.used = first.reshape(1, -1), count, 0
        self.places = np.full(
            count, -1, np.int64
        )  # of each row in `values`; -1: it is still the first state
        self.rows = np.empty(count, np.int64)  # the inverse
        try:
            self.values = first.new_empty(count, first.shape[-1])
        except RuntimeError:
            size = count * first.shape[-1] * first.itemsize / 1e9
            raise SpecError(
                f"the states of {count:,} clients take {size:,.0f} GB, more than there is memory for; set `states_dir` "
                "to keep them on disk"
            ) from None
        self._latest: tuple[Rows | None, torch.Tensor] = (None, torch.empty(0))

    def take(self, rows: Rows) -> torch.Tensor:
        places = self._places(rows)
        if (
            len(rows) == 1 and self.values.shape[1] >= LARGE
        ):  # the state of a large model is not copied
            return self.values[int(places) : int(places) + 1]
        return self.values.index_select(0, places)

    def put(self, rows: Rows, values: torch.Tensor) -> None:
        places = self._places(rows)
        if len(rows) == 1 and self.values.shape[1] >= LARGE:
            self.values[int(places)].copy_(values[0])  # nothing where it was changed in place
        else:
            self.values.index_copy_(0, places, values)

    def _places(self, rows: Rows) -> torch.Tensor:
        """Where rows are; those that have no place yet get one, with the first state in it."""
        if rows is self._latest[0]:  # a cohort is put back where it was taken
            return self._latest[1]
        places = self.places[rows]
        if self.used < self.count and places.min() < 0:
            new = rows[places < 0]
            start, self.used = self.used, self.used + len(new)
            self.rows[start : self.used] = new
            self.places[new] = np.arange(start, self.used)
            self.values[start : self.used] = self.first
            places = self.places[rows]
        self._latest = (rows, torch.from_numpy(places))
        return self._latest[1]

    def take_all(self) -> torch.Tensor:
        every = self.first.expand(self.count, -1).clone()
        return every.index_copy_(
            0, torch.from_numpy(self.rows[: self.used]), self.values[: self.used]
        )

    def saved(self) -> None:
        """Nothing is on disk."""

    def close(self) -> None:
        """Nothing is open."""

    def save(self) -> Arrays:
        return {
            "rows": torch.from_numpy(self.rows[: self.used]),
            "values": self.values[: self.used],
        }

    def load(self, saved: Arrays) -> None:
        check_forms(saved, {"rows": torch.zeros(0, dtype=torch.int64), "values": self.values[:0]})
        check_rows(saved["rows"], len(saved["values"]), self.count)
        self.used = len(saved["rows"])
        self.rows[: self.used] = saved["rows"].numpy()
        self.places.fill(-1)
        self._latest = (None, torch.empty(0))
        self.places[self.rows[: self.used]] = np.arange(self.used)
        self.values[: self.used] = saved["values"]


class OnDisk:
    """Rows in a sparse file.

    A checkpoint holds the number of the journal that leads back to it and a checksum of every row. A row that is not
    what the checkpoint says, because of a damaged or foreign file, is refused when it is read.
    """

    def __init__(
        self,
        path: Path,
        first: torch.Tensor,
        count: int,
        *,
        resume: bool,
        own: bool = False,
    ) -> None:
        if path.exists() and not resume and not own:
            raise SpecError(
                f"{str(path)!r} holds states of an earlier run; resume that run or choose another directory"
            )
        if first.any():
            raise SpecError(
                "states on disk start at zero, but those of this method do not; keep them in memory"
            )
        self.own = own  # in the run's own directory: what is there without a checkpoint is of no use to anyone
        self.path, self.count, self.dtype = path, count, first.dtype
        self.size, self.row_bytes = first.shape[-1], first.shape[-1] * first.itemsize
        self.checksums = np.zeros(count, np.int64)  # 0: the row was never written
        self.id = int.from_bytes(secrets.token_bytes(7), "little")
        self.file = self.journal = -1  # opened when there is something to write

    def __del__(self) -> None:
        if hasattr(self, "journal"):
            self.close()

    def close(self) -> None:
        """Close the files, so that they can be deleted on every system."""
        for file in (self.file, self.journal):
            if file >= 0:
                os.close(file)
        self.file = self.journal = -1

    def take(self, rows: Rows) -> torch.Tensor:
        if len(rows) == 1:  # a large model's state is not copied
            return self._read(int(rows[0])).unsqueeze(0)
        return torch.stack([self._read(row) for row in rows.tolist()])

    def put(self, rows: Rows, values: torch.Tensor) -> None:
        with disk_errors(self.path):
            if self.file < 0:
                self._create()
            for row, value in zip(rows.tolist(), values, strict=True):
                start = row * self.row_bytes
                if row not in self.journaled:
                    self.journal_end += write_at(
                        self.journal, row.to_bytes(8, "little"), self.journal_end
                    )
                    for part in range(start, start + self.row_bytes, COPIED):
                        old = read_at(self.file, min(COPIED, start + self.row_bytes - part), part)
                        self.journal_end += write_at(self.journal, old, self.journal_end)
                    self.journaled.add(row)
                raw = value.contiguous().view(torch.uint8).numpy().data
                write_at(self.file, raw, start)
                self.checksums[row] = self._checksum(row, raw)

    def take_all(self) -> torch.Tensor:
        return self.take(np.arange(self.count))

    def save(self) -> Arrays:
        """Starts a new journal; those before it stay until `saved`."""
        with disk_errors(self.path):
            if self.file < 0:
                self._create()
            system.flush(self.journal)
            system.flush(self.file)
            self._open_journal(self.number + 1)
        rows = np.flatnonzero(self.checksums)
        return {
            "journal": torch.tensor([self.id, self.number]),
            "rows": torch.from_numpy(rows),
            "checksums": torch.from_numpy(self.checksums[rows]),
        }

    def saved(self) -> None:
        """The checkpoint of the last `save` is on disk: the journals before it are not needed any more."""
        for number in self._journals():
            if number < self.number:
                remove(self._journal_path(number))

    def load(self, saved: Arrays) -> None:
        """Undoes all journals since the save, the latest first."""
        none = torch.zeros(0, dtype=torch.int64)
        check_forms(saved, {"journal": none.new_zeros(2), "rows": none, "checksums": none})
        check_rows(saved["rows"], len(saved["checksums"]), self.count)
        self.id, number = saved["journal"].tolist()
        if number < 0:
            raise CheckpointError(
                f"the checkpoint is damaged: {number} is the number of no journal; start the run again"
            )
        self.checksums = np.zeros(self.count, np.int64)
        self.checksums[saved["rows"].numpy()] = saved["checksums"].numpy()
        with disk_errors(self.path):
            self.close()
            self._open()
            for later in sorted((one for one in self._journals() if one >= number), reverse=True):
                for row, old in reversed(list(self._read_journal(later))):
                    write_at(self.file, old, row * self.row_bytes)
                system.flush(self.file)
                remove(self._journal_path(later))
            self._open_journal(number)

    def _create(self) -> None:
        make_dir(self.path.parent)
        if self.own:
            remove(self.path)
        self.file = system.open_bytes(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, private=True)
        system.make_sparse(self.file)
        write_at(self.file, b"\0", self.count * self.row_bytes - 1)
        write_atomic(self._about_path(), json.dumps(self._about()).encode(), private=True)
        for number in self._journals():  # of an earlier run, whose states were deleted
            remove(self._journal_path(number))
        self._open_journal(0)

    def _open(self) -> None:
        """Opens the file of an earlier process, if it is the one that the checkpoint was made with."""
        try:
            about = json.loads(self._about_path().read_bytes())
            self.file = system.open_bytes(self.path, os.O_RDWR)
        except (OSError, ValueError):
            raise CheckpointError(
                f"the states in {str(self.path)!r} are missing or damaged; put them back, or start the run again"
            ) from None
        if about != self._about() or os.fstat(self.file).st_size != self.count * self.row_bytes:
            raise CheckpointError(
                f"{str(self.path)!r} holds states of another run; put back those of this run, or start it again"
            )

    def _about(self) -> dict[str, object]:
        return {"id": self.id, "rows": self.count, "size": self.size, "dtype": str(self.dtype)}

    def _about_path(self) -> Path:
        return self.path.with_suffix(".json")

    def _journals(self) -> list[int]:
        files = [
            file.name.rsplit("-", 1)[1]
            for file in self.path.parent.glob(f"{self.path.stem}.journal-*")
        ]
        return [int(number) for number in files if number.isdecimal()]

    def _journal_path(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.stem}.journal-{number}")

    def _open_journal(self, number: int) -> None:
        if self.journal >= 0:
            os.close(self.journal)
        self.number, self.journal_end, self.journaled = number, 0, set[int]()
        path = self._journal_path(number)
        self.journal = system.open_bytes(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, private=True)

    def _read_journal(self, number: int) -> Iterator[tuple[int, bytes]]:
        """(row, old value). An entry that a crash cut short was never followed by a change of its row."""
        length = 8 + self.row_bytes
        with self._journal_path(number).open("rb") as file:
            while len(entry := file.read(length)) == length:
                row = int.from_bytes(entry[:8], "little")
                if row < self.count:  # else damaged: the row that it was of fails its checksum
                    yield row, entry[8:]

    def _checksum(self, row: int, raw: bytes | bytearray | memoryview) -> int:
        digest = hashlib.blake2b(
            raw, digest_size=8, salt=(self.id ^ row << 64).to_bytes(16, "little")
        )
        return int.from_bytes(digest.digest(), "little", signed=True) or 1

    def _read(self, row: int) -> torch.Tensor:
        if not self.checksums[row]:
            return torch.zeros(self.size, dtype=self.dtype)
        raw = read_at(self.file, self.row_bytes, row * self.row_bytes)
        if self._checksum(row, raw) != self.checksums[row]:
            raise CheckpointError(
                f"the state of client {row} in {str(self.path)!r} is damaged; put the file back, or start the run again"
            )
        return torch.frombuffer(raw, dtype=self.dtype)


Table = InMemory | OnDisk
