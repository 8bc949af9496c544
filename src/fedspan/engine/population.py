"""The states of all clients of a simulation: one table of rows per field of a state (`engine.states`).

A round reads and writes the rows of its clients only, so its cost grows with S and not with N. No client's copy of x is
stored: it equals the server's x of an earlier round.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedspan.core import wire
from fedspan.core.config import Engine
from fedspan.core.layout import Vector
from fedspan.core.method import Method
from fedspan.core.objective import Problem
from fedspan.core.round import Round
from fedspan.engine.states import InMemory, OnDisk, States, load_states, save_states, states_saved
from fedspan.engine.worker import without_zeros


class Population:
    """The clients' states in memory or in files."""

    def __init__(self, method: Method, problem: Problem, engine: Engine, *, resume: bool) -> None:
        self.problem = problem
        one = without_zeros(method.init_client(problem.x0[:1], problem.layout))
        self._kind = type(one)
        rows = problem.x0.shape[0] * problem.clients
        self.tables: dict[str, States] = {}
        self._empty: dict[str, Vector] = {}  # fields without numbers
        self._empties: dict[
            tuple[int, int], dict[str, Vector]
        ] = {}  # the same for so many runs and clients
        for name, part in vars(one).items():
            if not part[0].numel():
                self._empty[name] = part[0]
            elif engine.states_dir is None:
                self.tables[name] = InMemory(part[0], rows)
            else:
                path = Path(engine.states_dir) / f"{name}.states"
                self.tables[name] = OnDisk(path, part[0], rows, resume=resume)

    def take(self, rnd: Round) -> Any:
        """The states of a round's clients."""
        return self._state(
            {name: table.take(rnd.rows) for name, table in self.tables.items()}, *rnd.ids.shape
        )

    def take_all(self) -> Any:
        """The states of all clients, (runs, N, size)."""
        rows = {name: table.take_all() for name, table in self.tables.items()}
        return self._state(rows, self.problem.x0.shape[0], self.problem.clients)

    def _state(self, rows: dict[str, Vector], runs: int, clients: int) -> Any:
        """Rows of the tables as the states of clients."""
        full = {name: part.view(runs, clients, -1) for name, part in rows.items()}
        if (empty := self._empties.get((runs, clients))) is None:
            empty = {name: first.expand(runs, clients, -1) for name, first in self._empty.items()}
            self._empties[runs, clients] = empty
        return self._kind(**full, **empty)

    def put(self, rnd: Round, new: Any) -> None:
        """Stores the states of a round's clients."""
        for name, table in self.tables.items():
            table.put(rnd.rows, getattr(new, name).flatten(0, 1))

    def restart(self, rnd: Round) -> bool:
        """Whether a round's clients got their first states, as their last ones have been overwritten in memory."""
        lost = [
            table for table in self.tables.values() if rnd.overwrite and isinstance(table, InMemory)
        ]
        for table in lost:
            table.put(rnd.rows, table.first.expand(len(rnd.rows), -1))
        return bool(lost)

    def close(self) -> None:
        """Closes the files of the states, if any."""
        for table in self.tables.values():
            if isinstance(table, OnDisk):
                table.close()

    def save(self) -> wire.Arrays:
        """What a checkpoint must hold of the states."""
        return save_states(self.tables)

    def saved(self) -> None:
        """The checkpoint with what `save` gave is on disk."""
        states_saved(self.tables)

    def load(self, arrays: wire.Arrays) -> None:
        """Goes back to what `save` gave."""
        load_states(self.tables, arrays)
