"""Histories as curves over seeds: values, costs, and the mean of the last evaluations."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedspan.engine.history import PLAIN
from fedspan.engine.loop import Line

POINTS = 120  # rows of a curve that are kept
Floats = npt.NDArray[np.float64]
Axis = Literal["round", "up", "total", "seconds"]
TITLES: dict[Axis, str] = {  # {} is the unit of bytes
    "round": "round",
    "up": "{} sent up, all clients",
    "total": "{} sent, both directions, all clients",
    "seconds": "seconds of training",
}


@dataclass(frozen=True)
class Curve:
    """One metric of one spec over all seeds; rows that a seed does not have, or has after diverging, are nan."""

    rounds: Floats
    values: Floats  # (seeds, rows)
    up: Floats  # (rows,), mean over seeds
    down: Floats
    seconds: Floats
    diverged: list[int | None]  # round, per seed
    failed: list[bool]  # per seed
    up_most: Floats | None = None  # (rows,), of the seed that has sent most; None: the mean
    total_most: Floats | None = None  # the same in both directions

    @staticmethod
    def of(runs: Sequence[Sequence[Line]], metric: str) -> Curve:
        """From one list of rows per seed; a seed that failed has none.

        Only rounds count that all seeds have which got so far: a run that was extended has a row at its old end.
        """
        by_round = [{row["round"]: row for row in rows} for rows in runs]
        ends = [max(rows, default=-1) for rows in by_round]
        every: set[int] = set().union(*by_round)
        rounds = sorted(
            t
            for t in every
            if all(t in rows or end < t for rows, end in zip(by_round, ends, strict=True))
        )
        lasts = [rows[-1] if rows else {} for rows in runs]
        up, down, seconds = (
            _mean(by_round, rounds, name) for name in ("up_bytes", "down_bytes", "seconds")
        )
        return Curve(
            rounds=np.array(rounds or [0], float),
            values=np.array(
                [[_value(rows.get(t), metric) for t in rounds or [0]] for rows in by_round]
            ),
            up=up,
            down=down,
            seconds=seconds,
            diverged=[last["round"] if last.get("diverged") else None for last in lasts],
            failed=[not rows for rows in runs],
            up_most=_most(by_round, rounds, "up_bytes"),
            total_most=_most(by_round, rounds, "up_bytes", "down_bytes"),
        )

    def spent(self, axis: Axis) -> Floats:
        """What was spent up to each row."""
        return {
            "round": self.rounds,
            "up": self.up,
            "total": self.up + self.down,
            "seconds": self.seconds,
        }[axis]

    def most(self, axis: Axis) -> Floats:
        """What any seed has spent at most up to each row."""
        known = {"up": self.up_most, "total": self.total_most}.get(axis)
        return self.spent(axis) if known is None else known

    def until(self, rounds: int) -> Curve:
        """The rows up to a round; a seed that diverged later has not diverged here."""
        rows = int(np.searchsorted(self.rounds, rounds, side="right"))
        return replace(
            self.at_rows(np.arange(rows)),
            diverged=[t if t is not None and t <= rounds else None for t in self.diverged],
        )

    def at_rows(self, rows: npt.NDArray[np.int64]) -> Curve:
        """Some of the rows."""
        names = ("rounds", "up", "down", "seconds", "up_most", "total_most")
        cut = {name: known[rows] for name in names if (known := getattr(self, name)) is not None}
        return replace(self, values=self.values[:, rows], **cut)

    def alive(self) -> list[int]:
        """The seeds that neither diverged nor failed."""
        return [
            n
            for n, (t, lost) in enumerate(zip(self.diverged, self.failed, strict=True))
            if t is None and not lost
        ]

    def ends(self, last: int) -> Floats:
        """Mean over the last evaluations, for each seed that is alive; nan if none is."""
        alive = self.alive()
        return self.values[alive, -last:].mean(1) if alive else np.array([np.nan])

    def tail(self, last: int) -> Tail:
        """The same, over seeds."""
        return self._over_seeds(self.ends(last))

    def best(self, goal: Literal["max", "min"]) -> Tail:
        """The best evaluation of each seed, including seeds that diverged later."""
        pick = np.nanmax if goal == "max" else np.nanmin
        tops = [pick(row) for row in self.values if np.isfinite(row).any()]
        found = self._over_seeds(np.array(tops) if tops else np.full(len(self.alive()), np.nan))
        return replace(found, diverged=0) if tops else found

    def _over_seeds(self, values: Floats) -> Tail:
        known = values[np.isfinite(values)]
        mean, spread = (float(known.mean()) if len(known) else math.nan), math.nan
        if len(known) > 1:
            spread = float(known.std(ddof=1))
        gone, failed = sum(t is not None for t in self.diverged), sum(self.failed)
        undefined = len(values) - len(known) if gone + failed < len(self.diverged) else 0
        return Tail(mean, spread, gone, len(self.diverged), failed, undefined)


@dataclass(frozen=True)
class Tail:
    """A result over seeds: mean, standard deviation, and how many seeds have none."""

    mean: float
    spread: float
    diverged: int
    seeds: int
    failed: int = 0
    undefined: int = 0  # seeds whose metric is not a number, although they did not diverge

    @property
    def whole(self) -> bool:
        """Whether every seed has a result."""
        return not self.lost and math.isfinite(self.mean)

    @property
    def lost(self) -> dict[str, int]:
        """Why seeds have no result → how many."""
        counts = {"diverged": self.diverged, "failed": self.failed, "NaN": self.undefined}
        return {word: count for word, count in counts.items() if count}

    def text(self, value: str, spread: str) -> str:
        """In words, with the mean and the spread as the caller writes them."""
        if sum(self.lost.values()) == self.seeds:
            return next(iter(self.lost))
        text = value if math.isnan(self.spread) else f"{value} ± {spread}"
        gone = ", ".join(f"{n} of {self.seeds} {word}" for word, n in self.lost.items())
        return f"{text} ({gone})" if gone else text


def metrics_of(rows: Sequence[Line]) -> list[str]:
    """The metrics in a history."""
    return [name for name in rows[0] if name not in PLAIN] if rows else []


def over_seeds(values: Floats) -> tuple[Floats, Floats, Floats]:
    """Mean, lowest and highest over the seeds that have a row; nan if none has."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", RuntimeWarning
        )  # rows in which every seed has diverged are all nan
        return np.nanmean(values, 0), np.nanmin(values, 0), np.nanmax(values, 0)


def thinned(rows: int, points: int) -> npt.NDArray[np.int64]:
    """Row numbers to draw: at most `points` evenly on a linear axis, and as many on a logarithmic one."""
    even = np.linspace(0, rows - 1, min(rows, points))
    growing = np.geomspace(1, max(rows - 1, 1), min(rows, points)).clip(0, rows - 1)
    return np.unique(np.concatenate([even, growing]).astype(np.int64))


def _value(row: Line | None, metric: str) -> float:
    value = None if row is None or row.get("diverged") else row.get(metric)
    return math.nan if value is None else float(value)


def _mean(by_round: list[dict[int, Line]], rounds: list[int], name: str) -> Floats:
    """Mean over the seeds that have a round; it never falls when a seed drops out, because costs do not."""
    means = [np.mean([rows[t][name] for rows in by_round if t in rows]) for t in rounds]
    return np.maximum.accumulate(np.array(means or [0.0], float))


def _most(by_round: list[dict[int, Line]], rounds: list[int], *names: str) -> Floats:
    """The largest sum of some costs over the seeds that have a round; it never falls."""
    tops = [
        max(sum(rows[t][name] for name in names) for rows in by_round if t in rows) for t in rounds
    ]
    return np.maximum.accumulate(np.array(tops or [0.0], float))
