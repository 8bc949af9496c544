"""What a run will cost, before anything runs: its messages packed and counted, with no data and no gradients.

The method takes its real steps on an objective that is flat, so the bytes are those of real messages. Only the first
rounds are walked through; from the last of them a round's cost is taken to stay what it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedspan.core import wire
from fedspan.core.layout import Layout, Vector
from fedspan.core.method import Method, Round
from fedspan.core.objective import Flat, Objective, Problem
from fedspan.core.sync import SyncedDown
from fedspan.engine.loop import Loop
from fedspan.engine.simulator import Simulator

WALKED = 40  # rounds that are walked through


class FlatProblem(Problem):
    """A model of the right size over clients that have nothing to learn."""

    seeds = (0,)
    cohort_mode = "per_client"

    def __init__(self, layout: Layout, x0: Vector, clients: int) -> None:
        self.layout, self.x0, self.clients, self.weights = layout, x0, clients, None

    def cohort(self, rnd: Round) -> Objective:
        return Flat()

    def evaluate(self, x: Vector, buffers: Vector | None = None) -> Mapping[str, npt.NDArray[np.float64]]:
        return {}

    def diverged(self, metrics: Mapping[str, npt.NDArray[np.float64]]) -> npt.NDArray[np.bool_]:
        return np.array([False])


@dataclass(frozen=True)
class Cost:
    """Bytes of a method on a model, all clients together unless it is said."""

    up_round: float  # one client in one round, in the end
    down_round: float
    up: float  # the whole run
    down: float
    client_state: int  # one client, beside its copy of the model
    client_disk: int  # one client's file: two versions
    server_memory: int  # model, controls and log
    server_disk: int  # copies of all clients' states
    course: Course

    def sizes(self) -> list[float]:
        """All but the course."""
        return [getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "course"]


@dataclass(frozen=True)
class Course:
    """What has been sent after any number of rounds, so that a budget need not walk through them again."""

    walked: tuple[tuple[int, int], ...]  # (up, down) after 0, 1, 2, … rounds
    rates: tuple[float, float]  # of each round from there on

    def after(self, rounds: int) -> tuple[float, float]:
        """(up, down) of a run of that many rounds."""
        last = len(self.walked) - 1
        up, down = self.walked[min(rounds, last)]
        late = max(0, rounds - last)
        return up + late * self.rates[0], down + late * self.rates[1]


def cost(method: Method[Any, Any, Any, Any], problem: Problem, clients_per_round: int, rounds: int, seed: int) -> Cost:
    """Walk through the first rounds of a run and carry on from there."""
    flat = FlatProblem(problem.layout, problem.x0[:1], problem.clients)
    loop = Loop(method, flat, Simulator(method, flat), (seed,), clients_per_round)
    walked = min(rounds, max(WALKED, 2 * problem.clients // clients_per_round))
    totals = [(0, 0)]
    with torch.inference_mode():
        for _ in range(walked):
            loop.step()
            totals.append((int(loop.ledger.up.sum()), int(loop.ledger.down.sum())))
    late = max(1, walked // 2)
    up, down = ((totals[-1][i] - totals[-1 - late][i]) / late for i in (0, 1))
    course = Course(tuple(totals), (up, down))
    first = method.init_client(flat.x0, flat.layout)
    state = sum(_bytes(getattr(first, f.name)) for f in dataclasses.fields(first))
    copy = _bytes(flat.x0) if issubclass(method.types()[2], SyncedDown) else 0
    server = sum(_bytes(array) for array in wire.pack(loop.server).values())
    return Cost(
        up / clients_per_round, down / clients_per_round, *course.after(rounds),
        state, 2 * (state + copy), server, problem.clients * state, course,
    )  # fmt: skip


def _bytes(array: torch.Tensor) -> int:
    return array.numel() * array.element_size()
