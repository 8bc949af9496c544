"""The states of all clients, in memory or in files of which only the cohort's rows are read.

Each field of a client state is a table with one row per client and run; `take` and `put` move the rows of a cohort, so
that a round costs what its clients do and not what all of them do. No client's copy of x is stored: it equals the
server's x of an earlier round. A client that never took part uses neither memory nor disk space.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedspan.core import system
from fedspan.core.bundle import Bundle
from fedspan.core.errors import CheckpointError, SpecError
from fedspan.core.files import disk_errors, make_dir, read_at, remove, write_at
from fedspan.core.layout import Vector
from fedspan.core.wire import Arrays, check_forms

Rows = npt.NDArray[np.int64]
HEADER = 8  # bytes of a file before its rows: the number of its run


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
        self.tables, self.fixed = dict[str, Table](), dict[str, Vector]()
        for name, part in vars(first).items():
            if not part.numel() or name in without:
                self.fixed[name] = part[0]
            elif folder is None:
                self.tables[name] = InMemory(part[0], count)
            else:
                path = folder / f"{name}.states"
                self.tables[name] = OnDisk(path, part[0], count, resume=resume, own=own)

    def take(self, rows: Rows | None, shape: tuple[int, ...]) -> Bundle:
        """The states of rows, (runs, clients, size), to be read before the next `put`; of all rows by default."""
        parts = dict[str, Vector]()
        for name, table in self.tables.items():
            parts[name] = table.take(rows).view(*shape, -1)
        for name, part in self.fixed.items():
            parts[name] = part.expand(*shape, -1)
        return Bundle(**parts)

    def put(self, rows: Rows, states: Any) -> None:
        """Overwrites the states of rows."""
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
        tables = {name: table.save() for name, table in self.tables.items()}
        return {f"{name}.{part}": one for name, own in tables.items() for part, one in own.items()}

    def saved(self) -> None:
        """The checkpoint with what `save` gave is on disk."""
        for table in self.tables.values():
            table.saved()

    def load(self, saved: Arrays) -> None:
        """Returns to the moment of a `save`; other arrays are left alone."""
        for name, table in self.tables.items():
            own = (key for key in saved if key.startswith(f"{name}."))
            table.load({key.removeprefix(f"{name}."): saved[key] for key in own})

    def close(self) -> None:
        """Closes the files, if any, so that they can be deleted on every system."""
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
        # of each row in `values`; -1: it is still the first state
        self.places = np.full(count, -1, np.int64)
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

    def take(self, rows: Rows | None) -> torch.Tensor:
        if rows is None:
            every = self.first.expand(self.count, -1).clone()
            every[self.rows[: self.used]] = self.values[: self.used]
            return every
        places = self._places(rows)
        if len(rows) == 1:  # a large model's state is not copied
            return self.values[int(places) :][:1]
        return self.values.index_select(0, places)

    def put(self, rows: Rows, values: torch.Tensor) -> None:
        places = self._places(rows)
        if len(rows) == 1:
            self.values[int(places)] = values[0]  # nothing where it was changed in place
        else:
            self.values.index_copy_(0, places, values)

    def _places(self, rows: Rows) -> torch.Tensor:
        """Where rows are; those that have no place yet get one, with the first state in it."""
        if rows is self._latest[0]:  # a cohort is put back where it was taken
            return self._latest[1]
        places = self.places[rows]
        if self.used < self.count and places.min(initial=0) < 0:
            new = rows[places < 0]
            start, self.used = self.used, self.used + len(new)
            self.rows[start : self.used] = new
            self.places[new] = np.arange(start, self.used)
            self.values[start : self.used] = self.first
            places = self.places[rows]
        self._latest = (rows, torch.from_numpy(places))
        return self._latest[1]

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
        self.places.fill(-1)
        self.used, self._latest = 0, (None, torch.empty(0))
        self.put(saved["rows"].numpy(), saved["values"])


class OnDisk:
    """Rows in the slots of a file, in the order in which they were written.

    A slot that a checkpoint holds is not written again until a later checkpoint is on disk: a row that changes moves
    to a free slot. So a killed run finds the rows of its last checkpoint. The checkpoint holds the slot and a checksum
    of every row; a row that is not what it says, because of a damaged or foreign file, is refused when it is read.
    """

    file = -1  # opened when there is something to write

    def __init__(
        self, path: Path, first: torch.Tensor, count: int, *, resume: bool, own: bool = False
    ) -> None:
        if path.exists() and not resume and not own:
            raise SpecError(
                f"{str(path)!r} holds states of an earlier run; resume that run or choose another directory"
            )
        self.path, self.first, self.count, self.own = path, first.reshape(-1), count, own
        self.row_bytes = self.first.numel() * self.first.itemsize
        self.places = np.full(count, -1, np.int64)  # the slot of each row; -1: it was never written
        self.checksums = np.zeros(count, np.int64)
        self.end, self.free = 0, list[int]()  # slots of the file, and those that hold nothing
        self.kept = set[int]()  # slots of the last checkpoint on disk, and of later ones
        self.id = secrets.randbits(56)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        if self.file >= 0:
            os.close(self.file)
        self.file = -1

    def take(self, rows: Rows | None) -> torch.Tensor:
        found = [self._read(row) for row in (range(self.count) if rows is None else rows.tolist())]
        # a large model's state is not copied
        return found[0].unsqueeze(0) if len(found) == 1 else torch.stack(found)

    def put(self, rows: Rows, values: torch.Tensor) -> None:
        with disk_errors(self.path):
            self._create()
            for row, value in zip(rows.tolist(), values, strict=True):
                place = int(self.places[row])
                if place < 0 or place in self.kept:
                    place = self.free.pop() if self.free else self.end
                    self.end = max(self.end, place + 1)
                raw = value.contiguous().view(torch.uint8).numpy().data
                write_at(self.file, raw, HEADER + place * self.row_bytes)
                self.places[row], self.checksums[row] = place, self._checksum(row, raw)

    def save(self) -> Arrays:
        with disk_errors(self.path):
            self._create()
            system.flush(self.file)
        rows = np.flatnonzero(self.places >= 0)
        self.latest = set(self.places[rows].tolist())
        self.kept |= self.latest
        found = {"rows": rows, "places": self.places[rows], "checksums": self.checksums[rows]}
        return {"id": torch.tensor([self.id])} | {k: torch.from_numpy(v) for k, v in found.items()}

    def saved(self) -> None:
        self.kept = self.latest
        used = self.kept.union(self.places[self.places >= 0].tolist())
        self.free = [place for place in range(self.end) if place not in used]

    def load(self, saved: Arrays) -> None:
        none = torch.zeros(0, dtype=torch.int64)
        like = {"id": none.new_zeros(1), "rows": none, "places": none, "checksums": none}
        check_forms(saved, like)
        (self.id,), rows = saved["id"].tolist(), saved["rows"].numpy()
        self.close()
        try:
            self.file = system.open_bytes(self.path, os.O_RDWR)
            found = int.from_bytes(read_at(self.file, HEADER, 0), "little")
            slots = (os.fstat(self.file).st_size - HEADER) // self.row_bytes
        except OSError:
            raise CheckpointError(
                f"the states in {str(self.path)!r} are missing; put them back, or start the run again"
            ) from None
        if found != self.id:
            raise CheckpointError(
                f"{str(self.path)!r} holds states of another run, or is damaged; put back those of this run, or start "
                "it again"
            )
        for name, most in (("rows", self.count), ("places", slots)):
            check_rows(saved[name], len(saved["checksums"]), most)
        self.places.fill(-1)
        self.places[rows], self.checksums[rows] = saved["places"], saved["checksums"]
        self.latest, self.end = set(saved["places"].tolist()), slots
        self.saved()

    def _create(self) -> None:
        if self.file >= 0:
            return
        make_dir(self.path.parent)
        if self.own:  # what is there without a checkpoint is of no use to anyone
            remove(self.path)
        self.file = system.open_bytes(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, private=True)
        write_at(self.file, self.id.to_bytes(HEADER, "little"), 0)

    def _checksum(self, row: int, raw: bytes | bytearray | memoryview) -> int:
        salt = (self.id ^ row << 64).to_bytes(16, "little")
        digest = hashlib.blake2b(raw, digest_size=8, salt=salt).digest()
        return int.from_bytes(digest, "little", signed=True)

    def _read(self, row: int) -> torch.Tensor:
        place = int(self.places[row])
        if place < 0:
            return self.first.clone()
        raw = read_at(self.file, self.row_bytes, HEADER + place * self.row_bytes)
        if self._checksum(row, raw) != self.checksums[row]:
            raise CheckpointError(
                f"the state of client {row} in {str(self.path)!r} is damaged; put the file back, or start the run again"
            )
        return torch.frombuffer(raw, dtype=self.first.dtype)


Table = InMemory | OnDisk
