"""Histories as curves over seeds, and the mean of their end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedspan.core.errors import SpecError
from fedspan.runtimes import history

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """One spec over all seeds; rows after a divergence are nan."""

    rounds: Floats
    values: Floats  # (seeds, rows)
    up: Floats  # (rows,), mean over seeds
    down: Floats
    diverged: list[int | None]  # round, for each seed
    seconds: float  # of all seeds

    @staticmethod
    def read(files: Sequence[Path], metric: str, together: bool) -> Curve:
        """From one history a seed; `together`: the seeds were one computation and have one clock."""
        runs = [history.read(file)[1] for file in files]
        longest = max(runs, key=len)
        values = np.full((len(runs), len(longest)), np.nan)
        for number, rows in enumerate(runs):
            if metric not in rows[0]:
                known = ", ".join(k for k in rows[0] if k not in history.PLAIN)
                raise SpecError(f"{str(files[number])!r} has no metric {metric!r}; it has {known}")
            good = [np.nan if row.get("diverged") else row[metric] for row in rows]
            values[number, : len(good)] = good
        clocks = [float(rows[-1]["seconds"]) for rows in runs]
        return Curve(
            rounds=np.array([row["round"] for row in longest], float),
            values=values,
            up=np.array([row["up_bytes"] for row in longest], float),
            down=np.array([row["down_bytes"] for row in longest], float),
            diverged=[rows[-1]["round"] if rows[-1].get("diverged") else None for rows in runs],
            seconds=max(clocks) if together else sum(clocks),
        )

    def until(self, rounds: int) -> Curve:
        """The beginning of the run; a seed that diverged later had not done so yet."""
        rows = int(np.searchsorted(self.rounds, rounds, side="right"))
        diverged = [t if t is not None and t <= rounds else None for t in self.diverged]
        return Curve(
            self.rounds[:rows], self.values[:, :rows], self.up[:rows], self.down[:rows], diverged, self.seconds
        )

    def tail(self, last: int) -> Tail:
        """Mean over the last evaluations, for each seed that did not diverge."""
        alive = [number for number, t in enumerate(self.diverged) if t is None]
        means = self.values[alive, -last:].mean(1) if alive else np.array([np.nan])
        spread = float(means.std(ddof=1)) if len(means) > 1 else math.nan
        return Tail(float(means.mean()), spread, len(self.diverged) - len(alive), len(self.diverged))


@dataclass(frozen=True)
class Tail:
    """The end of a curve over seeds: mean, standard deviation, and how many seeds diverged."""

    mean: float
    spread: float
    diverged: int
    seeds: int

    def text(self, value: str, spread: str) -> str:
        """In words, with the mean and the spread written by the caller."""
        if self.diverged == self.seeds:
            return "diverged"
        text = value if math.isnan(self.spread) else f"{value} ± {spread}"
        return f"{text} ({self.diverged} of {self.seeds} diverged)" if self.diverged else text
