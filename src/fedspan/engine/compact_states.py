"""Client states kept as the numbers that each client sent, for as long as these are fewer than the state itself.

SSF's control is a sum over rounds, c_i = Σ P_tᵀ a_t, and every P_t follows from the seed. A client that took part n
times is therefore n vectors of r numbers and their rounds, which is less than d while n·r < d. `CompactStates` stores
these entries, replays them when the state is needed, and stores the d numbers themselves once these are fewer. In a
population where most clients take part a few times, no full-size state exists at all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from fedspan.core.errors import CheckpointError
from fedspan.core.layout import Vector
from fedspan.core.wire import Arrays, check_forms
from fedspan.engine.states import Rows, check_rows

Replay = Callable[
    [Vector, Vector, int, int], Vector
]  # (state, entry, round, row) → state after the round


@dataclass
class CompactState:
    """One client: the state it starts from, and one entry per round since."""

    start: Vector | None = None  # None: the initial state that all clients share
    rounds: list[int] = field(default_factory=list)
    entries: list[Vector] = field(default_factory=list)

    def numel(self) -> int:
        """How many numbers are stored."""
        return sum(
            part.numel() for part in ([] if self.start is None else [self.start]) + self.entries
        )


class CompactStates:
    """One field of all clients' states, each row replayed from its entries."""

    def __init__(self, first: torch.Tensor, count: int, replay: Replay) -> None:
        self.first, self.count, self.replay = first.reshape(1, 1, -1), count, replay
        self.states: dict[int, CompactState] = {}  # by row; clients that never took part have none

    def take(self, rows: Rows) -> torch.Tensor:
        """Replay rows: (len(rows), size)."""
        return torch.stack([self._state(row)[0, 0] for row in rows.tolist()])

    def append(self, rows: Rows, t: int, entries: torch.Tensor) -> None:
        """Add what the clients of these rows sent in round t."""
        for row, entry in zip(rows.tolist(), entries, strict=True):
            state = self.states.setdefault(row, CompactState())
            state.rounds.append(t)
            state.entries.append(entry.reshape(1, 1, -1).clone())
            if state.start is not None or state.numel() >= self.first.numel():
                self.states[row] = CompactState(self._state(row))

    def take_all(self) -> torch.Tensor:
        """All rows, in memory; for small populations."""
        return torch.stack([self._state(row)[0, 0] for row in range(self.count)])

    def numel(self) -> int:
        """How many numbers are stored; full states would be `count` times the size of one."""
        return sum(state.numel() for state in self.states.values())

    def _state(self, row: int) -> Vector:
        compact = self.states.get(row, CompactState())
        state = self.first if compact.start is None else compact.start
        for t, entry in zip(compact.rounds, compact.entries, strict=True):
            state = self.replay(state, entry, t, row)
        return state

    def save(self) -> Arrays:
        """All entries one after the other, with the row and the number of entries of each client."""
        some = {row: state for row, state in self.states.items() if state.start is None}
        full = {row: state.start for row, state in self.states.items() if state.start is not None}
        entries = [entry for state in some.values() for entry in state.entries]
        return {
            "rows": torch.tensor(list(some), dtype=torch.int64),
            "counts": torch.tensor(
                [len(state.rounds) for state in some.values()], dtype=torch.int64
            ),
            "rounds": torch.tensor(
                [t for state in some.values() for t in state.rounds], dtype=torch.int64
            ),
            "entries": torch.cat(entries) if entries else self.first[:0, :, :0],
            "full_rows": torch.tensor(list(full), dtype=torch.int64),
            "full": torch.cat(list(full.values())) if full else self.first[:0],
        }

    def load(self, saved: Arrays) -> None:
        """Return to the moment of a `save`."""
        none = torch.zeros(0, dtype=torch.int64)
        forms = dict.fromkeys(("rows", "counts", "rounds", "full_rows"), none)
        forms |= {"entries": self.first[:0, :, :0], "full": self.first[:0]}
        check_forms(saved, forms)
        check_rows(
            torch.cat([saved["rows"], saved["full_rows"]]),
            len(saved["counts"]) + len(saved["full"]),
            self.count,
        )
        counts, rounds, entries = (
            saved["counts"].tolist(),
            saved["rounds"].tolist(),
            _each(saved["entries"]),
        )
        if (
            not sum(counts) == len(rounds) == len(entries)
            or min(counts, default=1) < 1
            or min(rounds, default=0) < 0
        ):
            raise CheckpointError(
                "the checkpoint is damaged: its compact states are incomplete; start the run again"
            )
        ends = itertools.accumulate(counts)
        self.states = {
            row: CompactState(None, rounds[end - count : end], entries[end - count : end])
            for row, count, end in zip(saved["rows"].tolist(), counts, ends, strict=True)
        }
        full = zip(saved["full_rows"].tolist(), _each(saved["full"]), strict=True)
        self.states |= {row: CompactState(start) for row, start in full}
        for row in saved["rows"][:1].tolist():  # fails where entries are of another length
            self._state(row)


def _each(vectors: Vector) -> list[Vector]:
    return list(vectors.unsqueeze(1).unbind())
