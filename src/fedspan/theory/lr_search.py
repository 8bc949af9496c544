"""Find the local learning rate of any method by short trials: `method.lr = "search"`.

1. Probes of a few rounds halve or double the rate until they find the largest one that does not diverge.
2. Longer trials follow at falling rates. Where the task knows the error itself (`rel_err`), a forecast from them says
   which rate is best at the end of the run. Elsewhere trials are equally long and the lowest loss wins, among rates of
   at most a third of the lowest one that diverged.
   The lowest error of a short trial favors large steps, which are ahead early and stop at a higher noise floor.

A server that scales its own steps (FedAdam) moves about as far at every local rate: none diverges, and at first all
fall alike. There the search takes the lowest rate that is still as fast as any, because its noise is lowest.

The loss is the validation loss if the task has validation data, else the training loss on a fixed sample of the
clients' data (`Problem.training_loss`). Trials never look at the test set. Their rounds and bytes are reported apart
from those of the run.

The forecast splits the squared error into two parts,

    e²(η, t) = G(ηt) + V(η)        a transient in the time ηt, and a noise floor V = aη + bη²

Trials that have settled give V. The lowest rate that has come far gives G, extended beyond its end by the decay seen
last. The best rate for T rounds has the lowest G(ηT) + V(η).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from fedspan.core.config import Engine, Participation, Search
from fedspan.core.errors import SpecError
from fedspan.core.layout import Vector
from fedspan.core.method import Method
from fedspan.core.objective import Problem
from fedspan.engine.loop import Loop
from fedspan.engine.simulator import Simulator
from fedspan.replies.chain import Chain

Floats = npt.NDArray[np.float64]
Floor = Callable[[Floats | float], Floats]
Metrics = Mapping[str, Floats]
MIN_BUDGET = 40  # rounds that a search may always use
TRIALS = 8  # trials as long as the run that a search of a very short run may use
TRAINING_LOSS = "training loss"
WORSE = 2.0  # a trial whose measure is above this multiple of the start has diverged
TURNED = 1.3  # so has one above this multiple of its lowest value and above half the start
FALL = 3.0  # factor between the rates of two trials; its square root after a trial that never fell
POINTS = 30  # evaluations per trial
MARGIN = 3.0  # factor from the lowest rate that diverged, where only the loss is known
EQUAL_TRIALS = 4  # trials where only the loss is known, or where the server scales its steps
ALIKE = 0.9  # a trial that falls this share of the largest fall is as fast
WIDE = 8  # factor between rates, and number of rates, where the server scales its steps
DEEP = 8.0  # a decrease of an error's logarithm that ends in noise
FAR = 0.05  # share of the squared start below which the rest of a transient can be predicted
SLOWDOWN = 0.9  # a decay goes on at this share of the slope seen last
UNSEEN_FLOOR = 0.1  # share of a trial's squared error that an unseen floor is guessed to be
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
        last = np.square(self.values[-3 * fifth :])
        a, b, c = (float(np.mean(part)) for part in np.split(last, 3))
        bend = a + c - 2 * b
        found = (a * c - b * b) / bend if bend > 0 else 0.0
        return found if a > b > c and found > 0.1 * c else None

    def fall(self, t: int | None = None) -> float:
        """Decrease of the logarithm of the measure until round t, the last by default; −∞ where it diverged."""
        if self.diverged:
            return -math.inf
        value = float(np.interp(self.rounds if t is None else t, self.at, self.values))
        return math.log(self.values[0] / max(value, TINY))


@dataclass(frozen=True)
class SearchResult:
    """The learning rate that a search found, and the trials behind it."""

    lr: float
    trials: list[RateTrial]
    metric: str  # what the trials were measured by: "rel_err", "validation_loss" or "training loss"

    @property
    def rounds(self) -> int:
        """Rounds of all trials together."""
        return _spent(self.trials)

    @property
    def bytes(self) -> int:
        """Bytes that the clients of all trials sent and received."""
        return sum(trial.bytes for trial in self.trials)

    @property
    def cost(self) -> str:
        """What the trials took: 5 trials, 75 rounds, 1.2 MB."""
        return f"{len(self.trials)} trials, {self.rounds} rounds, {self.bytes / 1e6:.3g} MB"


def budget_of(how: Search, rounds: int) -> int:
    """Rounds for all trials: `share` of the run, but at least 40, or 8 times a run of fewer than 5 rounds."""
    return max(int(how.share * rounds), min(MIN_BUDGET, TRIALS * rounds))


def search(
    method: Method, problem: Problem, clients_per_round: int, rounds: int,
    how: Search | None = None, done: Sequence[RateTrial] = (), keep: Callable[[RateTrial], None] = lambda _: None,
    participation: Participation | None = None,
) -> SearchResult:  # fmt: skip
    """The local learning rate for a run of `rounds` rounds; `method.lr` is ignored.

    `done` are the trials that an interrupted search of the same run has finished; `keep` is told of every further one.
    """
    how = how or Search()
    budget = budget_of(how, rounds)
    run = TrialRunner(method, problem, clients_per_round, rounds, done, keep, participation)
    probes = _highest_stable(run, how.start, min(rounds, max(4, budget // 30)), budget // 3)
    known = run.metric == "rel_err"
    if _alike(probes):
        lr, trials = _lowest_alike(run, probes, budget, rounds if known else 0)
        return SearchResult(lr, trials, run.metric)
    # trials at falling rates until the budget is spent; none is longer than the run
    lr, left, trials = probes[-1].lr, budget - _spent(probes), []
    longest = min(rounds, left if known else left // EQUAL_TRIALS)
    while left >= max(min(4, longest), min(longest, MIN_BUDGET // 4)):
        length = min(longest, -(-left // 2) if known else left)
        trial = run(lr, length, until_settled=known, must_fall=True)
        trials.append(trial)
        left -= trial.rounds
        never_fell = trial.diverged and min(trial.values) > run.first / TURNED**0.5
        lr /= math.sqrt(FALL) if never_fell else FALL
    edge = min((trial.lr for trial in (*probes, *trials) if trial.diverged), default=math.inf)
    stable = [trial for trial in trials if trial.lr < edge]
    if not stable:
        raise SpecError(
            f"no rate down to {trials[-1].lr:g} lowers the {run.metric}; set `search.start` lower"
        )
    if known:
        best = best_lr(stable, rounds)
    else:  # a few rounds do not show the instability of rates that are near it
        far = [trial for trial in stable if trial.lr <= edge / MARGIN] or stable
        best = min(far, key=lambda trial: trial.tail).lr
    return SearchResult(best, [*probes, *trials], run.metric)


def _spent(trials: list[RateTrial]) -> int:
    return sum(trial.rounds for trial in trials)


def _highest_stable(run: TrialRunner, start: float, probe: int, budget: int) -> list[RateTrial]:
    """Probes by factors of 2, down to the first rate that does not diverge, or up to the last; that one comes last."""
    trials, lr = [run(start, probe)], start
    up = not trials[0].diverged
    while _spent(trials) < budget:
        lr = lr * 2 if up else lr / 2
        trials.append(run(lr, probe))
        if trials[-1].diverged == up or _alike(trials):
            break
    if up and trials[-1].diverged:
        trials = [trials[-1], *trials[:-1]]
    if trials[-1].diverged:
        raise SpecError(
            f"every rate down to {lr:g} diverged in the search; set `search.start` lower"
        )
    return trials


def _alike(probes: list[RateTrial]) -> bool:
    """Whether the last three rates fall alike, although the largest is four times the smallest."""
    last = probes[-3:]
    if len(last) != 3 or any(trial.diverged for trial in last):
        return False
    falls = [trial.fall() for trial in last]
    return min(falls) > ALIKE * max(falls) > 0


def _lowest_alike(
    run: TrialRunner, probes: list[RateTrial], budget: int, rounds: int
) -> tuple[float, list[RateTrial]]:
    """The lowest rate that is fast enough: short probes far down, then longer trials below the last good one."""
    top, probe = probes[-3], probes[0].rounds
    count = min(WIDE, (budget - _spent(probes)) // probe - EQUAL_TRIALS + 1)
    scan = [top, *(run(top.lr / WIDE**k, probe) for k in range(1, count))]
    low = min(_fast_enough(scan, rounds))
    seen = [*(trial for trial in probes if trial is not top), *scan]
    each = (budget - _spent(seen)) // EQUAL_TRIALS
    longer = [run(low / 2**k, each, must_fall=True) for k in range(EQUAL_TRIALS)]
    stable = [trial for trial in longer if not trial.diverged]
    if not stable:
        raise SpecError(
            f"no rate around {low:g} lowers the {run.metric}; give `method.lr` a number"
        )
    return min(_fast_enough(stable, rounds)), [*seen, *longer]


def _fast_enough(trials: list[RateTrial], rounds: int) -> list[float]:
    """Rates of equally long trials that come far within the run, or fall nearly as far as any."""
    least = ALIKE * max(trial.fall() for trial in trials)
    least = min(least, DEEP * trials[0].rounds / rounds if rounds else math.inf)
    return [trial.lr for trial in trials if trial.fall() >= least]


class _Untested:
    """A problem whose only metric is its training loss: there is no test set to see."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def __getattr__(self, name: str) -> Any:
        return getattr(self.problem, name)

    def evaluate(self, x: Vector, buffers: Vector | None = None) -> Metrics:
        loss = self.problem.training_loss(x, buffers)
        if loss is None:
            raise SpecError(
                "a search needs an error or a loss to measure; give `method.lr` a number"
            )
        return {TRAINING_LOSS: loss}


class TrialRunner:
    """Runs trials of one method on one problem, as the first rounds of a run of `rounds`."""

    def __init__(
        self, method: Method, problem: Problem, clients_per_round: int, rounds: int,
        done: Sequence[RateTrial], keep: Callable[[RateTrial], None], participation: Participation | None = None,
    ) -> None:  # fmt: skip
        self.done, self.keep = list(done), keep
        self.method, self.problem = method.without_tests(), problem
        self.clients_per_round, self.rounds = clients_per_round, rounds
        self.participation = participation or Participation()
        start = problem.evaluate(problem.x0, problem.buffers0)
        known = [name for name in ("rel_err", "validation_loss") if name in start]
        self.metric = known[0] if known else TRAINING_LOSS
        if not known:
            self.problem = cast(Problem, _Untested(problem))
            start = self.problem.evaluate(problem.x0, problem.buffers0)
        self.first, self.offset = float(start[self.metric].mean()), 0.0
        if (
            self.first <= 0
        ):  # such as a likelihood of densities: trials compare multiples of the start
            self.first, self.offset = 1.0, 1 - self.first

    def __call__(
        self, lr: float, rounds: int, until_settled: bool = False, must_fall: bool = False
    ) -> RateTrial:
        """Run `rounds` rounds, fewer if the trial diverges or settles; with `must_fall` not falling is diverging."""
        if self.done and self.done[0].lr == lr:  # a search takes the same steps again
            return self.done.pop(0)
        self.done.clear()
        trial = self._run(lr, rounds, until_settled, must_fall)
        self.keep(trial)
        return trial

    def _run(self, lr: float, rounds: int, until_settled: bool, must_fall: bool) -> RateTrial:
        method: Any = dataclasses.replace(self.method, lr=lr)  # type: ignore[type-var]
        trial, how = RateTrial(lr, 0, [], [], False), self.participation
        with Simulator(method, self.problem, Engine()) as clients:
            loop = Loop(
                method, self.problem, clients, self.problem.seeds, self.clients_per_round, rounds=self.rounds,
                chain=Chain(method, dataclasses.replace(how, screen=None), runs=len(self.problem.seeds)),
                known_start=how.known_start, unbiased=how.unbiased,
            )  # fmt: skip
            for row in loop.rows(rounds, max(1, rounds // POINTS)):
                value = float(row.metrics[self.metric].mean()) + self.offset
                lowest = min(trial.values, default=value)
                turned = must_fall and value > max(self.first / 2, TURNED * lowest)
                bad = bool(row.diverged.any()) or turned or not value < WORSE * self.first
                at, values = [*trial.at, row.round], [*trial.values, value]
                sent = int(row.up_bytes.sum() + row.down_bytes.sum())
                trial = RateTrial(lr, row.round, at, values, bad, sent)
                if bad or (until_settled and trial.settled):
                    break
        never_fell = must_fall and trial.tail >= self.first
        return dataclasses.replace(trial, diverged=trial.diverged or never_fell)


# ---- the forecast


def best_lr(trials: list[RateTrial], rounds: int) -> float:
    """The rate with the lowest predicted error at the end of the run."""
    floors = _floors(trials)
    if (
        not floors
    ):  # the lowest rate that falls at least 80 % as far as the best trial in as many rounds
        best = min(trials, key=lambda trial: trial.level)
        long = [trial for trial in trials if best.rounds / 4 <= trial.rounds <= best.rounds]
        return min(trial.lr for trial in long if trial.fall() >= 0.8 * best.fall(trial.rounds))
    floor = _fit(floors)  # a trial below the fit shows that its floor is lower still
    lower = [(t.lr, t.level) for t in trials if not t.settled and t.level < floor(t.lr)]
    floor = _fit([*floors, *lower]) if lower else floor
    times, transient = _transient(trials, floor)
    rates = max(trial.lr for trial in trials) * np.geomspace(1e-4, 1, 400)
    # log G: interpolated inside, beyond the end with the slope of the second half
    ahead: Floats = np.interp(rates * rounds, times, transient)
    late = times >= times[-1] / 2
    if late.sum() > 2:
        slope = SLOWDOWN * min(0.0, float(np.polyfit(times[late], transient[late], 1)[0]))
        ahead = ahead + slope * np.maximum(rates * rounds - times[-1], 0.0)
    return float(rates[np.argmin(np.exp(ahead) + floor(rates))])


def _floors(trials: list[RateTrial]) -> list[tuple[float, float]]:
    """(η, V) of the settled trials; where none has settled, of those whose limit can be predicted.

    Where there are none of these either, the floor of a trial that has come far is guessed. A guess is good enough
    because the choice of a rate depends on the logarithm of V only.
    """
    settled = [(one.lr, one.level) for one in trials if one.settled]
    limits = [(one.lr, one.predicted_level) for one in trials]
    predicted = [(lr, level) for lr, level in limits if level is not None]
    far = [one for one in trials if one.level < FAR * one.values[0] ** 2]
    return settled or predicted or [(one.lr, UNSEEN_FLOOR * one.level) for one in far[:1]]


def _fit(floors: list[tuple[float, float]]) -> Floor:
    """V(η) = aη + bη² with a, b ≥ 0 and the smallest relative errors."""
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
        falling = np.log(np.minimum.accumulate(squares[seen]))
        found.append((trial.lr * np.array(trial.at)[seen], falling))
        if falling[-1] < math.log(FAR) + falling[0]:
            return found[-1]
    return min(found, key=lambda one: float(one[1][-1]))
