"""Predict from short trials which local learning rate has the lowest error at the end of a run.

The squared error is split into two parts,

    e²(η, t) = G(ηt) + V(η)        a transient in the time ηt, and a noise floor V = aη + bη²

Trials that have settled give V. The lowest rate that has come far gives G, extended beyond its end by the decay seen
last. The best rate for T rounds has the lowest G(ηT) + V(η).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Floor = Callable[[Floats | float], Floats]
FAR = 0.05  # share of the squared start below which the rest of a transient can be predicted
SLOWDOWN = 0.9  # a decay goes on at this share of the slope seen last
UNSEEN_FLOOR = (
    0.1  # share of a trial's squared error that its floor is guessed to be when none is in sight
)
HIGHEST_FLOOR = 0.25  # share of the squared start above which a trial is slow rather than settled
TINY = 1e-300  # keeps logarithms of losses that reach zero or less finite


@dataclass(frozen=True)
class RateTrial:
    """One learning rate and the values measured with it."""

    lr: float
    rounds: int  # rounds run
    at: list[int]  # rounds of the evaluations
    values: list[float]  # the measure at these rounds
    diverged: bool
    bytes: int = 0  # sent up and down by all clients

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
        return bool(self.level > 0.85 * before and self.level < HIGHEST_FLOOR * self.values[0] ** 2)

    @property
    def predicted_level(self) -> float | None:
        """Limit of the squares, with the last three fifths as a geometric decay (Aitken); None where it is unclear."""
        fifth = len(self.values) // 5
        if self.diverged or fifth < 3 or self.level >= HIGHEST_FLOOR * self.values[0] ** 2:
            return None
        a, b, c = (
            float(np.mean(np.square(part)))
            for part in np.split(np.array(self.values[-3 * fifth :]), 3)
        )
        bend = a + c - 2 * b
        found = (a * c - b * b) / bend if bend > 0 else 0.0
        return found if a > b > c and found > 0.1 * c else None

    def fall(self, t: int | None = None) -> float:
        """Decrease of the logarithm of the measure until round t, the last by default; −∞ where it diverged."""
        if self.diverged:
            return -math.inf
        value = float(np.interp(self.rounds if t is None else t, self.at, self.values))
        return math.log(self.values[0] / max(value, TINY))


def best_lr(trials: list[RateTrial], rounds: int) -> float:
    """The rate with the lowest predicted error at the end of the run."""
    if not _floors(trials):
        return _fastest(trials)
    floor, top = _floor(trials), max(trial.lr for trial in trials)
    times, transient = _transient(trials, floor)
    rates = top * np.geomspace(1e-4, 1, 400)
    predicted = np.exp(_extended(rates * rounds, times, transient)) + floor(rates)
    return float(rates[np.argmin(predicted)])


def _fastest(trials: list[RateTrial]) -> float:
    """The lowest rate that falls at least 80 % as far as the best trial in as many rounds."""
    best = min(trials, key=lambda trial: trial.level)
    long = [trial for trial in trials if best.rounds / 4 <= trial.rounds <= best.rounds]
    return min(trial.lr for trial in long if trial.fall() >= 0.8 * best.fall(trial.rounds))


def _floor(trials: list[RateTrial]) -> Floor:
    """V(η), fitted to the floors of the trials; a trial below the fit shows that its floor is lower still."""
    known = _floors(trials)
    fit = _fit(known)
    lower = [(t.lr, t.level) for t in trials if not t.settled and t.level < fit(t.lr)]
    return _fit([*known, *lower]) if lower else fit


def _floors(trials: list[RateTrial]) -> list[tuple[float, float]]:
    """(η, V) of the settled trials; where none has settled, of those whose limit can be predicted.

    Where there are none of these either, the floor of a trial that has come far is guessed. A guess is good enough
    because the choice of a rate depends on the logarithm of V only.
    """
    settled = [(trial.lr, trial.level) for trial in trials if trial.settled]
    predicted = [
        (trial.lr, trial.predicted_level) for trial in trials if trial.predicted_level is not None
    ]
    far = [
        (trial.lr, UNSEEN_FLOOR * trial.level)
        for trial in trials
        if trial.level < FAR * trial.values[0] ** 2
    ]
    return settled or predicted or far[:1]


def _fit(floors: list[tuple[float, float]]) -> Floor:
    """aη + bη² with a, b ≥ 0 and the smallest relative errors."""
    lrs, levels = (np.array(v) for v in zip(*floors, strict=True))
    best, a, b = math.inf, 0.0, 0.0
    for powers in ((1,), (2,), (1, 2)):
        matrix = np.stack([lrs**power for power in powers], 1) / levels[:, None]
        fit, *_ = np.linalg.lstsq(matrix, np.ones(len(lrs)), rcond=None)
        error = float(np.square(matrix @ fit - 1).sum())
        if (fit >= 0).all() and error < 0.99 * best - 1e-12:
            found = dict(zip(powers, fit.tolist(), strict=True))
            best, a, b = error, found.get(1, 0.0), found.get(2, 0.0)
    return lambda lr: np.asarray(a * lr + b * lr**2)


def _transient(trials: list[RateTrial], floor: Floor) -> tuple[Floats, Floats]:
    """log G at times ηt, from the lowest rate that has come far: larger steps are less exact in time."""
    found: list[tuple[Floats, Floats]] = []
    for trial in sorted(trials, key=lambda trial: trial.lr):
        squares = np.square(trial.values)
        seen = squares - floor(trial.lr) > 0.5 * squares
        seen[0] = True
        found.append(
            (trial.lr * np.array(trial.at)[seen], np.log(np.minimum.accumulate(squares[seen])))
        )
        if found[-1][1][-1] < math.log(FAR) + found[-1][1][0]:
            return found[-1]
    return min(found, key=lambda one: float(one[1][-1]))


def _extended(at: Floats, times: Floats, values: Floats) -> Floats:
    """log G at other times: interpolated inside, beyond the end with the slope of the second half."""
    inside: Floats = np.interp(at, times, values)
    late = times >= times[-1] / 2
    if late.sum() > 2:
        slope = SLOWDOWN * min(0.0, float(np.polyfit(times[late], values[late], 1)[0]))
        inside = inside + slope * np.maximum(at - times[-1], 0.0)
    return inside
