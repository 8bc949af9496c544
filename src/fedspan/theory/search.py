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
        """Mean of the last third."""
        return float(np.mean(self.values[-max(1, len(self.values) // 3) :]))

    @property
    def level(self) -> float:
        """Mean square of the last third."""
        return float(np.mean(np.square(self.values[-max(1, len(self.values) // 3) :])))

    @property
    def settled(self) -> bool:
        """Whether the last third is no longer clearly below the one before it."""
        third = len(self.values) // 3
        if self.diverged or third < 3:
            return False
        before = np.mean(np.square(self.values[-2 * third : -third]))
        return bool(self.level > 0.8 * before and self.level < LOW * self.values[0] ** 2)


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
    floor = _floor([trial for trial in trials if trial.settled])
    top = max(trial.lr for trial in trials)
    times, transient = _transient(trials, floor)
    rates = top * np.geomspace(1e-4, 1, 400)
    predicted = np.exp(_extended(np.log(rates * rounds), times, transient)) + floor(rates)
    return float(rates[np.argmin(predicted)])


def _floor(settled: list[Trial]) -> Any:
    """V(η) = aη + bη² through what the settled trials ended at; nothing where none has settled."""
    if not settled:
        return lambda lr: 0.0 * lr
    lrs, levels = (np.array(v) for v in zip(*((t.lr, t.level) for t in settled), strict=True))
    best = (math.inf, 0.0, 0.0)
    for columns in ([lrs], [lrs**2], [lrs, lrs**2]):
        matrix = np.stack(columns, 1) / levels[:, None]
        fit, *_ = np.linalg.lstsq(matrix, np.ones(len(lrs)), rcond=None)
        off = float(np.square(matrix @ fit - 1).sum())
        if (fit >= 0).all() and off < 0.99 * best[0]:
            a, b = (fit[0], 0.0) if columns[0] is lrs and len(fit) == 1 else (0.0, fit[0]) if len(fit) == 1 else fit
            best = (off, float(a), float(b))
    return lambda lr: best[1] * lr + best[2] * lr**2


def _transient(trials: list[Trial], floor: Any) -> tuple[Floats, Floats]:
    """log G against log ηt, from all trials where they stand well above their floor."""
    points = [(trial.lr / 2, trial.values[0] ** 2) for trial in trials]  # before the first round nothing has moved
    for trial in trials:
        for t, value in zip(trial.at, trial.values, strict=True):
            above = value**2 - float(floor(trial.lr))
            if t > 0 and above > 0.5 * value**2:
                points.append((trial.lr * t, above))
    points.sort()
    times, values = (np.array(v) for v in zip(*points, strict=True))
    return np.log(times), np.log(np.minimum.accumulate(values))


def _extended(at: Floats, times: Floats, values: Floats) -> Floats:
    """log G at other times: between the points by interpolation, beyond them by the decay seen last."""
    inside: Floats = np.interp(at, times, values)
    late = times > times[-1] - math.log(2)
    if late.sum() > 2:
        slope = min(0.0, float(np.polyfit(np.exp(times[late]), values[late], 1)[0]))
        inside = inside + np.where(at > times[-1], slope * (np.exp(at) - np.exp(times[-1])), 0.0)
    return inside
