"""`bench`: seconds that a round of a spec takes, in each way of simulating its clients."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from fedspan.api.step_size import built
from fedspan.core import registry
from fedspan.core.config import Engine, Simulate
from fedspan.core.errors import SpecError
from fedspan.core.objective import Problem
from fedspan.core.spec import Spec
from fedspan.engine.loop import Loop
from fedspan.engine.simulator import Simulator

TURNS, ROUNDS = 3, 2  # the ways take turns, so that a slow spell of the machine hits all of them


@dataclass(frozen=True)
class Timing:
    """A way of simulating, and how long a round takes."""

    simulate: Simulate
    seconds: float  # of a round, in the fastest turn
    chosen: bool  # whether the spec runs in this way


def bench(spec: Spec) -> list[Timing]:
    """Time a few rounds in every way that the network allows. No number of a run depends on it."""
    method, problem, cohort = built(spec)
    if problem.cohort_mode == "batched":
        raise SpecError(
            f"the task {registry.name_of(spec.task)!r} computes all clients of a round at once in any case"
        )
    usual = Simulator(method, problem, Engine(simulate=spec.engine.simulate)).how(cohort)
    times: dict[Simulate, list[float]] = {"loop": [], "batched": [], "pool": []}
    for _ in range(TURNS):
        for way in list(times):
            try:
                times[way].append(
                    _seconds(
                        method, problem, cohort, Engine(simulate=way, workers=spec.engine.workers)
                    )
                )
            except (
                RuntimeError,
                TypeError,
                ValueError,
                AttributeError,
            ):  # such as of networks that vmap cannot batch
                if way == usual:
                    raise
                del times[way]
    return [Timing(way, min(found), way == usual) for way, found in times.items()]


def _seconds(method: Any, problem: Problem, cohort: int, engine: Engine) -> float:
    with Simulator(method, problem, engine) as clients, torch.inference_mode():
        loop = Loop(method, problem, clients, problem.seeds, cohort, rounds=ROUNDS + 1)
        loop.step()  # fills caches and begins processes
        began = time.perf_counter()
        for _ in range(ROUNDS):
            loop.step()
    return (time.perf_counter() - began) / ROUNDS
