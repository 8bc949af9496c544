"""All clients in one process; the sampled cohort moves as one batched computation.

Client states are rows, one table a field (`runtimes.states`). A round reads and writes the rows of its cohort only, so
its cost grows with S and not with N. Nobody's copy of x is stored: it equals the server's x of the round it dates from,
and `down.sync` shows the server's.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedspan.core import wire
from fedspan.core.errors import one_of
from fedspan.core.layout import Vector
from fedspan.core.method import Method, Round
from fedspan.core.objective import Problem
from fedspan.runtimes.states import STORED, InMemory, OnDisk, States
from fedspan.runtimes.worker import work

Places = npt.NDArray[np.int64]


class Simulator:
    """A Transport whose other end is this process."""

    def __init__(
        self,
        method: Method[Any, Any, Any, Any],
        problem: Problem,
        folder: Path | None = None,
        stored: str = "float32",
        resume: bool = False,
    ) -> None:
        self.method, self.problem = method, problem
        one = method.init_client(problem.x0[:1], problem.layout)
        self._kind = type(one)
        rows = problem.x0.shape[0] * problem.clients
        self._population: dict[str, States] = {}
        for field in dataclasses.fields(one):
            first = getattr(one, field.name)[0]
            if folder is None or not first.numel():
                self._population[field.name] = InMemory(first, rows)
            else:
                one_of("states_dtype", stored, STORED)
                path, dtype = folder / f"{field.name}.states", STORED[stored]
                self._population[field.name] = OnDisk(path, first, rows, dtype, resume=resume)

    def exchange(self, rnd: Round, down: Any, aside: Vector | None) -> tuple[Places, Any, Vector | None]:
        """Hand the download to the cohort, all at once or in turn; (places that replied, replies, what came beside)."""
        cohort = rnd.ids.shape[1]
        size = self.problem.together or cohort
        if size >= cohort:
            return np.arange(cohort), *self._some(rnd, down, aside)
        parts = [
            self._some(rnd.among(np.arange(i, min(i + size, cohort))), down, aside) for i in range(0, cohort, size)
        ]
        beside = None if parts[0][1] is None else torch.cat([part[1] for part in parts if part[1] is not None], 1)
        return np.arange(cohort), wire.gather([part[0] for part in parts]), beside

    def _some(self, rnd: Round, down: Any, aside: Vector | None) -> tuple[Any, Vector | None]:
        runs, cohort = rnd.ids.shape
        rows = {name: states.take(rnd.rows) for name, states in self._population.items()}
        state = self._kind(**{name: part.unflatten(0, (runs, cohort)) for name, part in rows.items()})
        new, up, beside = work(self.method, self.problem, state, down, aside, rnd)
        for name, states in self._population.items():
            states.put(rnd.rows, getattr(new, name).flatten(0, 1))
        return up, beside

    def clients(self) -> Any:
        """The states of all clients, (runs, N, size)."""
        shape = (self.problem.x0.shape[0], self.problem.clients)
        return self._kind(**{name: states.every().unflatten(0, shape) for name, states in self._population.items()})

    def save(self) -> wire.Arrays:
        """What a checkpoint must hold of the clients."""
        return {name: states.save() for name, states in self._population.items()}

    def load(self, arrays: wire.Arrays) -> None:
        """Go back to what `save` gave."""
        for name, states in self._population.items():
            states.load(arrays[name])
