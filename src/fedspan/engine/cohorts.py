"""Who takes part in which round; every round's clients are drawn by its own key."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from fedspan.core import seeds as streams
from fedspan.core.round import Schedule, flat_rows

DRAWN_AHEAD = 64  # rounds whose cohorts are drawn at once


@functools.lru_cache(maxsize=4)
def cohorts(seeds: tuple[int, ...], clients: int, size: int, part: int) -> Schedule:
    """Who takes part in DRAWN_AHEAD consecutive rounds; each round depends on its own key alone."""
    rounds = range(part * DRAWN_AHEAD, (part + 1) * DRAWN_AHEAD)
    ids = streams.choose(streams.keys_of_rounds(seeds, "cohort", rounds), clients, size)
    return Schedule(rounds.start, ids, flat_rows(ids, clients))


def cohort_of(seeds: tuple[int, ...], clients: int, size: int, t: int) -> npt.NDArray[np.int64]:
    """Who takes part in round t, (runs, S)."""
    ids: npt.NDArray[np.int64] = cohorts(seeds, clients, size, t // DRAWN_AHEAD).ids[
        t % DRAWN_AHEAD
    ]
    return ids
