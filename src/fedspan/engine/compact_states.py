"""States as what they are made of: the numbers each client sent in the rounds it took part in.

SSF's control is a sum over rounds, c_i = Σ P_tᵀ a_t, and every P_t follows from the seed. A client that has taken part
n times is therefore n vectors of r numbers and their rounds, which is less than d as long as n·r < d. `Trails` keeps
that, replays it when the state is needed, and keeps the d numbers themselves once they are fewer. For a population
of which most clients take part a few times there is then no full-size state at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import safetensors.torch
import torch

from fedspan.core.layout import Vector
from fedspan.engine.states import Rows

Grow = Callable[[Vector, Vector, int, int], Vector]  # (state, entry, round, row) → state after the round


@dataclass
class CompactState:
    """One client: a state it starts from, and what has happened since."""

    first: Vector | None = None  # None: the state that all begin with
    rounds: list[int] = field(default_factory=list)
    entries: list[Vector] = field(default_factory=list)

    def numbers(self) -> int:
        """How many are kept."""
        own = 0 if self.first is None else self.first.numel()
        return own + sum(entry.numel() for entry in self.entries)


class CompactStates:
    """Rows of states that are replayed from their trails."""

    def __init__(self, first: torch.Tensor, count: int, grow: Grow) -> None:
        self.first, self.count, self.grow = first.reshape(1, 1, -1), count, grow
        self.compact_states: dict[int, CompactState] = {}

    def take(self, rows: Rows) -> torch.Tensor:
        """Rows by number, each made anew."""
        return torch.stack([self._state(row)[0, 0] for row in rows.tolist()])

    def note(self, rows: Rows, t: int, entries: torch.Tensor) -> None:
        """What these rows' clients sent in round t."""
        for row, entry in zip(rows.tolist(), entries, strict=True):
            compact_states = self.compact_states.setdefault(row, CompactState())
            compact_states.rounds.append(t)
            compact_states.entries.append(entry.reshape(1, 1, -1).clone())
            if compact_states.first is not None or compact_states.numbers() >= self.first.numel():
                self.compact_states[row] = CompactState(self._state(row))

    def every(self) -> torch.Tensor:
        """All rows, in memory: for inspection of small populations."""
        return torch.stack([self._state(row)[0, 0] for row in range(self.count)])

    def numbers(self) -> int:
        """How many numbers all trails hold; `count` times the size of a state would be kept otherwise."""
        return sum(compact_states.numbers() for compact_states in self.compact_states.values())

    def _state(self, row: int) -> Vector:
        compact_states = self.compact_states.get(row, CompactState())
        state = self.first if compact_states.first is None else compact_states.first
        for t, entry in zip(compact_states.rounds, compact_states.entries, strict=True):
            state = self.grow(state, entry, t, row)
        return state

    def save(self) -> torch.Tensor:
        """All trails as one array of bytes."""
        arrays: dict[str, torch.Tensor] = {}
        for row, compact_states in self.compact_states.items():
            if compact_states.first is not None:
                arrays[f"{row}.first"] = compact_states.first.contiguous()
            else:
                arrays[f"{row}.rounds"] = torch.tensor(compact_states.rounds)
                arrays[f"{row}.entries"] = torch.cat(compact_states.entries, 1).contiguous()
        return torch.frombuffer(bytearray(safetensors.torch.save(arrays)), dtype=torch.uint8)

    def load(self, saved: torch.Tensor) -> None:
        """Come back to the moment of a `save`."""
        self.compact_states = {}
        for name, array in safetensors.torch.load(saved.numpy().tobytes()).items():
            row, _, what = name.partition(".")
            compact_states = self.compact_states.setdefault(int(row), CompactState())
            if what == "first":
                compact_states.first = array
            elif what == "rounds":
                compact_states.rounds = array.tolist()
            else:
                compact_states.entries = list(array.split(1, 1))
