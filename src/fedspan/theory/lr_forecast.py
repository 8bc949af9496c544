"""Which local step is best at the end of a run, told from short trials of several.

The square of the error is taken apart,

    e²(η, t) = G(ηt) + V(η)        a transient in the time ηt, and a floor of noise, V = aη + bη²

Trials that have settled tell V, the lowest rate that has come far tells G, beyond its end by the decay seen last. The
rate with the lowest G(ηT) + V(η) is best at the end of T rounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
FAR = 0.05  # of the start's square: from here on what is left of a transient can be told
SLOWER = 0.9  # what is left of a decay is its slow part
UNSEEN = 0.1  # of a trial's square: a floor that is not in sight yet
LOW = 0.25  # of the start's square: a floor above this is no floor but slowness


@dataclass(frozen=True)
class Trial:
    """One rate, as far as it was followed."""

    lr: float
    rounds: int  # that were run
    at: list[int]
    values: list[float]  # the metric at these rounds
    diverged: bool

    @property
    def tail(self) -> float:
        """Mean of the last fifth."""
        return float(np.mean(self.values[-max(1, len(self.values) // 5) :]))

    @property
    def level(self) -> float:
        """Mean square of the last fifth."""
        return float(np.mean(np.square(self.values[-max(1, len(self.values) // 5) :])))

    @property
    def settled(self) -> bool:
        """Whether the last fifth is no longer clearly below the one before it."""
        fifth = len(self.values) // 5
        if self.diverged or fifth < 2:
            return False
        before = np.mean(np.square(self.values[-2 * fifth : -fifth]))
        return bool(self.level > 0.85 * before and self.level < LOW * self.values[0] ** 2)

    def fallen(self, t: int) -> float:
        """How far the logarithm of the metric has come down by round t; nowhere where it diverged."""
        if self.diverged:
            return -math.inf
        return math.log(self.values[0] / float(np.interp(t, self.at, self.values)))

    @property
    def ahead(self) -> float | None:
        """The square it is settling at, its last three fifths taken as a geometric decay (Aitken); None: none seen."""
        fifth = len(self.values) // 5
        if self.diverged or fifth < 3 or self.level >= LOW * self.values[0] ** 2:
            return None
        a, b, c = (float(np.mean(np.square(part))) for part in np.split(np.array(self.values[-3 * fifth :]), 3))
        bend = a + c - 2 * b
        found = (a * c - b * b) / bend if bend > 0 else 0.0
        return found if a > b > c and found > 0.1 * c else None


def best_rate(trials: list[Trial], rounds: int) -> float:
    """The rate with the lowest predicted error at the end of the run."""
    if not _ends(trials):
        return _fastest(trials)
    floor, top = _floor(trials), max(trial.lr for trial in trials)
    times, transient = _transient(trials, floor)
    rates = top * np.geomspace(1e-4, 1, 400)
    predicted = np.exp(_extended(rates * rounds, times, transient)) + floor(rates)
    return float(rates[np.argmin(predicted)])


def _fastest(trials: list[Trial]) -> float:
    """No floor in sight: the lowest rate that falls four fifths as far as the best trial in as many rounds."""
    best = min(trials, key=lambda trial: trial.level)
    long = [trial for trial in trials if best.rounds / 4 <= trial.rounds <= best.rounds]
    return min(trial.lr for trial in long if trial.fallen(trial.rounds) >= 0.8 * best.fallen(trial.rounds))


def _floor(trials: list[Trial]) -> Any:
    """V(η) through what the settled trials ended at; one that has come lower than it says counts as settled too."""
    ends = _ends(trials)
    fit = _fitted(ends)
    lower = [(t.lr, t.level) for t in trials if not t.settled and t.level < fit(t.lr)]
    return _fitted([*ends, *lower]) if lower else fit


def _ends(trials: list[Trial]) -> list[tuple[float, float]]:
    """(η, V) of the trials that have settled; where none has, of those that can be told where they would.

    Where that cannot be told either but a trial has come far, its floor is guessed to be UNSEEN of where it is: the
    choice of a rate depends on the logarithm of V alone.
    """
    settled = [(trial.lr, trial.level) for trial in trials if trial.settled]
    told = [(trial.lr, trial.ahead) for trial in trials if trial.ahead is not None]
    far = [(trial.lr, UNSEEN * trial.level) for trial in trials if trial.level < FAR * trial.values[0] ** 2]
    return settled or told or far[:1]


def _fitted(ends: list[tuple[float, float]]) -> Any:
    """aη + bη², a and b not negative, with the smallest relative errors."""
    lrs, levels = (np.array(v) for v in zip(*ends, strict=True))
    best, a, b = math.inf, 0.0, 0.0
    for powers in ((1,), (2,), (1, 2)):
        matrix = np.stack([lrs**power for power in powers], 1) / levels[:, None]
        fit, *_ = np.linalg.lstsq(matrix, np.ones(len(lrs)), rcond=None)
        off = float(np.square(matrix @ fit - 1).sum())
        if (fit >= 0).all() and off < 0.99 * best - 1e-12:
            found = dict(zip(powers, fit.tolist(), strict=True))
            best, a, b = off, found.get(1, 0.0), found.get(2, 0.0)
    return lambda lr: a * lr + b * lr**2


def _transient(trials: list[Trial], floor: Any) -> tuple[Floats, Floats]:
    """log G at times ηt, of the lowest rate that has come far: larger steps make less of the same time."""
    found: list[tuple[Floats, Floats]] = []
    for trial in sorted(trials, key=lambda trial: trial.lr):
        squares = np.square(trial.values)
        seen = squares - floor(trial.lr) > 0.5 * squares
        seen[0] = True
        found.append((trial.lr * np.array(trial.at)[seen], np.log(np.minimum.accumulate(squares[seen]))))
        if found[-1][1][-1] < math.log(FAR) + found[-1][1][0]:
            return found[-1]
    return min(found, key=lambda one: float(one[1][-1]))


def _extended(at: Floats, times: Floats, values: Floats) -> Floats:
    """log G at other times: between the points by interpolation, beyond them by the decay of their second half."""
    inside: Floats = np.interp(at, times, values)
    late = times >= times[-1] / 2
    if late.sum() > 2:
        slope = SLOWER * min(0.0, float(np.polyfit(times[late], values[late], 1)[0]))
        inside = inside + slope * np.maximum(at - times[-1], 0.0)
    return inside
