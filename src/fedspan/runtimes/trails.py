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
from fedspan.runtimes.states import Rows

Grow = Callable[[Vector, Vector, int, int], Vector]  # (state, entry, round, row) → state after the round


@dataclass
class Trail:
    """One client: a state it starts from, and what has happened since."""

    first: Vector | None = None  # None: the state that all begin with
    rounds: list[int] = field(default_factory=list)
    entries: list[Vector] = field(default_factory=list)

    def numbers(self) -> int:
        """How many are kept."""
        own = 0 if self.first is None else self.first.numel()
        return own + sum(entry.numel() for entry in self.entries)


class Trails:
    """Rows of states that are replayed from their trails."""

    def __init__(self, first: torch.Tensor, count: int, grow: Grow) -> None:
        self.first, self.count, self.grow = first.reshape(1, 1, -1), count, grow
        self.trails: dict[int, Trail] = {}

    def take(self, rows: Rows) -> torch.Tensor:
        """Rows by number, each made anew."""
        return torch.stack([self._state(row)[0, 0] for row in rows.tolist()])

    def note(self, rows: Rows, t: int, entries: torch.Tensor) -> None:
        """What these rows' clients sent in round t."""
        for row, entry in zip(rows.tolist(), entries, strict=True):
            trail = self.trails.setdefault(row, Trail())
            trail.rounds.append(t)
            trail.entries.append(entry.reshape(1, 1, -1).clone())
            if trail.first is not None or trail.numbers() >= self.first.numel():
                self.trails[row] = Trail(self._state(row))

    def every(self) -> torch.Tensor:
        """All rows, in memory: for inspection of small populations."""
        return torch.stack([self._state(row)[0, 0] for row in range(self.count)])

    def numbers(self) -> int:
        """How many numbers all trails hold; `count` times the size of a state would be kept otherwise."""
        return sum(trail.numbers() for trail in self.trails.values())

    def _state(self, row: int) -> Vector:
        trail = self.trails.get(row, Trail())
        state = self.first if trail.first is None else trail.first
        for t, entry in zip(trail.rounds, trail.entries, strict=True):
            state = self.grow(state, entry, t, row)
        return state

    def save(self) -> torch.Tensor:
        """All trails as one array of bytes."""
        arrays: dict[str, torch.Tensor] = {}
        for row, trail in self.trails.items():
            if trail.first is not None:
                arrays[f"{row}.first"] = trail.first.contiguous()
            else:
                arrays[f"{row}.rounds"] = torch.tensor(trail.rounds)
                arrays[f"{row}.entries"] = torch.cat(trail.entries, 1).contiguous()
        return torch.frombuffer(bytearray(safetensors.torch.save(arrays)), dtype=torch.uint8)

    def load(self, saved: torch.Tensor) -> None:
        """Come back to the moment of a `save`."""
        self.trails = {}
        for name, array in safetensors.torch.load(saved.numpy().tobytes()).items():
            row, _, what = name.partition(".")
            trail = self.trails.setdefault(int(row), Trail())
            if what == "first":
                trail.first = array
            elif what == "rounds":
                trail.rounds = array.tolist()
            else:
                trail.entries = list(array.split(1, 1))
