"""Ways of simulating the clients of a round, and which is fastest here, found by timing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from fedspan.core.config import Simulate

WAYS: tuple[Simulate, ...] = ("auto", "loop", "batched", "pool")
LONG_RUN = 10.0  # seconds of a run in a loop from which other ways are tried
ROUNDS_PER_WAY = 4  # and rounds of the run for each way that is tried
SHARE = 0.05  # of such a run, which may be spent on timing again; all ways are timed once in any case
TIMES = 4  # at most so often
FASTER = 0.95  # another way must take less than this share of the loop's time


class Way(NamedTuple):
    """How a cohort is computed."""

    how: Simulate
    threads: int = 0  # 0: as many as torch is set to


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    """Torch with another number of threads; 0: as it is."""
    before = torch.get_num_threads()
    if number in (0, before):
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def timed(runs: Mapping[Way, Callable[[], Any]], budget: float) -> dict[Way, float]:
    """Least seconds of each way that works. They take turns, so that a slow spell of the machine hits all of them."""
    times: dict[Way, float] = {}
    began = time.perf_counter()
    for number in range(TIMES):
        for way in list(times) if number else runs:
            seconds = _seconds(runs[way])
            if seconds is not None:
                times[way] = min(seconds, times.get(way, seconds))
        if time.perf_counter() - began > budget:
            break
    return times


def fastest(times: Mapping[Way, float]) -> Way:
    """The way with the least time; the loop where that is hardly less."""
    loop = Way("loop")
    best = min(times, key=lambda way: times[way], default=loop)
    return best if loop not in times or times[best] < FASTER * times[loop] else loop


def _seconds(run: Callable[[], Any]) -> float | None:
    """Seconds of a call; None where it cannot be done."""
    began = time.perf_counter()
    try:
        run()
    except (RuntimeError, TypeError, ValueError, AttributeError):  # what vmap raises for networks it cannot batch
        return None
    return time.perf_counter() - began
