"""The local step by a short search, for any method: trials from a rate that diverges downwards, then a look ahead.

The paper's search takes the rate with the lowest error after 500 rounds. That favours large steps: they are ahead early
and stop at a higher floor. Where the error itself is known (`rel_err`), its square is taken apart instead:

    e²(η, t) = G(ηt) + V(η)        a transient in the time ηt, and a floor of noise, V = aη + bη²

Trials at falling rates, each until its floor or the end of the budget, tell V and, above the floors, G. The rate with
the lowest G(ηT) + V(η) at the end of the run is taken. Where the error is not known (networks) the trials are equally
long and the lowest loss counts, as in the paper.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedspan.core.errors import SpecError
from fedspan.core.method import Method
from fedspan.core.objective import Problem
from fedspan.runtimes.loop import Loop
from fedspan.runtimes.simulator import Simulator

Floats = npt.NDArray[np.float64]
LEAST = 40  # rounds below which a search says nothing
WORSE = 2.0  # times the start: an error or loss past this has diverged
FALL = 3.0  # from one trial's rate to the next; less after one that diverged
FAR = 0.05  # of the start's square: from here on what is left of a transient can be told
LOW = 0.25  # of the start's square: a floor above this is no floor but slowness
POINTS = 30  # evaluations of a trial
EQUAL = 4  # trials where only the loss is known


@dataclass(frozen=True, kw_only=True)
class Search:
    """How much a search may cost."""

    share: float = 0.15  # of the run's rounds, all trials together
    start: float = 1.0  # the first rate tried

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise SpecError(f"`search.share` must be in (0, 1], got {self.share!r}")
        if not 0 < self.start < math.inf:
            raise SpecError(f"`search.start` must be a positive number, got {self.start!r}")


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


@dataclass(frozen=True)
class Found:
    """The rate a search came to, and what it looked at."""

    lr: float
    trials: list[Trial]

    @property
    def rounds(self) -> int:
        """Rounds that all trials took."""
        return sum(trial.rounds for trial in self.trials)


def search(
    method: Method[Any, Any, Any, Any], problem: Problem, per_round: int, rounds: int, how: Search | None = None
) -> Found:
    """The local step for a run of `rounds` rounds."""
    how = how or Search()
    left = budget = int(how.share * rounds)
    if budget < LEAST:
        raise SpecError(f"a search in {budget} rounds says nothing; make `rounds` or `search.share` larger")
    run = _Runner(method, problem, per_round)
    probes, trials = _highest(run, how.start, max(4, budget // 30), budget // 3), list[Trial]()
    left -= sum(trial.rounds for trial in probes)
    lr, known = probes[-1].lr, run.metric == "rel_err"
    most = budget if known else left // EQUAL
    while left >= max(4, min(LEAST // 4, most)):
        trials.append(run(lr, min(most, -(-left // 2) if known else left), until_settled=known, must_fall=True))
        left -= trials[-1].rounds
        lr /= math.sqrt(FALL) if trials[-1].diverged else FALL
    edge = min((trial.lr for trial in (*probes, *trials) if trial.diverged), default=math.inf)
    stable = [trial for trial in trials if trial.lr < edge]
    if not stable:
        raise SpecError(f"no rate down to {trials[-1].lr:g} lowers the {run.metric}; set `search.start` lower")
    best = _ahead(stable, rounds) if known else min(stable, key=lambda trial: trial.tail).lr
    return Found(best, [*probes, *trials])


def _highest(run: _Runner, start: float, probe: int, budget: int) -> list[Trial]:
    """Probes by factors of 2, down to the first rate that does not diverge, or up to the last."""
    trials, lr = [run(start, probe)], start
    up = not trials[0].diverged
    while sum(trial.rounds for trial in trials) < budget:
        lr = lr * 2 if up else lr / 2
        trials.append(run(lr, probe))
        if trials[-1].diverged == up:
            break
    if up and trials[-1].diverged:
        trials = [trials[-1], *trials[:-1]]
    if trials[-1].diverged:
        raise SpecError(f"every rate down to {lr:g} diverged in the search; set `search.start` lower")
    return trials


class _Runner:
    """Trials of one method on one problem."""

    def __init__(self, method: Method[Any, Any, Any, Any], problem: Problem, per_round: int) -> None:
        self.method, self.problem, self.per_round = method, problem, per_round
        start = problem.evaluate(problem.x0, problem.aside0)
        self.metric = next((name for name in ("rel_err", "loss") if name in start), None)
        if self.metric is None:
            raise SpecError("a search needs a task with an error or a loss to go by; give `method.lr` a number")
        self.first = float(start[self.metric].mean())

    def __call__(self, lr: float, rounds: int, until_settled: bool = False, must_fall: bool = False) -> Trial:
        """Some rounds, or until it diverges or has settled; one that `must_fall` and does not counts as diverged."""
        method: Any = dataclasses.replace(self.method, lr=lr)  # type: ignore[type-var]
        trial = Trial(lr, 0, [], [], False)
        with Simulator(method, self.problem) as clients:
            loop = Loop(method, self.problem, clients, self.problem.seeds, self.per_round)
            for row in loop.rows(rounds, max(1, rounds // POINTS)):
                value = float(row.metrics[self.metric or ""].mean())
                bad = bool(row.diverged.any()) or not value < WORSE * self.first
                trial = Trial(lr, row.round, [*trial.at, row.round], [*trial.values, value], bad)
                if bad or (until_settled and trial.settled):
                    break
        return dataclasses.replace(trial, diverged=trial.diverged or (must_fall and trial.tail >= self.first))


def _ahead(trials: list[Trial], rounds: int) -> float:
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

    def fallen(trial: Trial, t: int) -> float:
        return math.log(trial.values[0] / float(np.interp(t, trial.at, trial.values)))

    near = [t.lr for t in trials if t.rounds <= best.rounds and fallen(t, t.rounds) >= 0.8 * fallen(best, t.rounds)]
    return min(near)


def _floor(trials: list[Trial]) -> Any:
    """V(η) through what the settled trials ended at; one that has come lower than it says counts as settled too."""
    ends = _ends(trials)
    fit = _fitted(ends)
    lower = [(t.lr, t.level) for t in trials if not t.settled and t.level < fit(t.lr)]
    return _fitted([*ends, *lower]) if lower else fit


def _ends(trials: list[Trial]) -> list[tuple[float, float]]:
    """(η, V) of the trials that have settled; where none has, of those that can be told where they would."""
    settled = [(trial.lr, trial.level) for trial in trials if trial.settled]
    return settled or [(trial.lr, trial.ahead) for trial in trials if trial.ahead is not None]


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
        slope = min(0.0, float(np.polyfit(times[late], values[late], 1)[0]))
        inside = inside + slope * np.maximum(at - times[-1], 0.0)
    return inside
