"""Find the local learning rate of any method by short trials: `method.lr = "search"`.

1. Probes of a few rounds halve or double the rate until they find the largest one that does not diverge.
2. Longer trials follow at falling rates. Where the task knows the error itself (`rel_err`), `lr_forecast` predicts
   from them which rate is best at the end of the run. Elsewhere trials are equally long and the lowest loss wins,
   among rates of at most a third of the lowest one that diverged.
   The lowest error of a short trial favors large steps, which are ahead early and stop at a higher noise floor.

A server that scales its own steps (FedAdam) moves about as far at every local rate: none diverges, and at first all
fall alike. There the search takes the lowest rate that is still as fast as any, because its noise is lowest.

The loss is the validation loss if the task has validation data, else the training loss on a fixed sample of the
clients' data (`Problem.training_loss`). Trials never look at the test set. Their rounds and bytes are reported apart
from those of the run.
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
from fedspan.theory.lr_forecast import RateTrial, best_lr

Metrics = Mapping[str, npt.NDArray[np.float64]]
MIN_BUDGET = 40  # rounds that a search may always use
TRIALS = 8  # trials as long as the run that a search of a very short run may use
TRAINING_LOSS = "training loss"
WORSE = 2.0  # a trial whose measure is above this multiple of the start has diverged
TURNED = 1.3  # so has one above this multiple of its lowest value and above half the start
FALL = 3.0  # factor between the rates of two trials; its square root after a trial that never fell
POINTS = 30  # evaluations per trial
MARGIN = (
    3.0  # factor that a rate keeps from the lowest one that diverged, where only the loss is known
)
EQUAL_TRIALS = 4  # trials where only the loss is known, or where the server scales its steps
ALIKE = 0.9  # a trial that falls this share of the largest fall is as fast
WIDE = 8  # factor between rates, and number of rates, where the server scales its steps
DEEP = 8.0  # a decrease of an error's logarithm that ends in noise


@dataclass(frozen=True)
class SearchResult:
    """The learning rate that a search found, and the trials behind it."""

    lr: float
    trials: list[RateTrial]
    metric: str  # what the trials were measured by: "rel_err", "validation_loss" or "training loss"
    run_rounds: int  # rounds of the run that the rate is for

    @property
    def rounds(self) -> int:
        """Rounds of all trials together."""
        return sum(trial.rounds for trial in self.trials)

    @property
    def bytes(self) -> int:
        """Bytes that the clients of all trials sent and received."""
        return sum(trial.bytes for trial in self.trials)

    @property
    def cost(self) -> str:
        """What the trials took: 5 trials, 75 rounds, 1.2 MB."""
        return f"{len(self.trials)} trials, {self.rounds} rounds, {self.bytes / 1e6:.3g} MB"

    def summary(self) -> str:
        """The result and its cost in one line."""
        share = f"{self.rounds / self.run_rounds:.0%} of the run's {self.run_rounds} rounds"
        return f"lr = {self.lr:.3g} by the {self.metric} (search: {self.cost}, {share})"


def budget_of(how: Search, rounds: int) -> int:
    """Rounds for all trials: `share` of the run, but at least 40, or 8 times a run of fewer than 5 rounds."""
    return max(int(how.share * rounds), min(MIN_BUDGET, TRIALS * rounds))


def search(
    method: Method[Any, Any, Any, Any], problem: Problem, clients_per_round: int, rounds: int,
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
        return SearchResult(lr, trials, run.metric, rounds)
    trials = _falling(run, probes[-1].lr, budget - _spent(probes), rounds, known)
    edge = min((trial.lr for trial in (*probes, *trials) if trial.diverged), default=math.inf)
    stable = [trial for trial in trials if trial.lr < edge]
    if not stable:
        raise SpecError(
            f"no rate down to {trials[-1].lr:g} lowers the {run.metric}; set `search.start` lower"
        )
    if not known:  # a few rounds do not show the instability of rates that are near it
        stable = [trial for trial in stable if trial.lr <= edge / MARGIN] or stable
    best = best_lr(stable, rounds) if known else min(stable, key=lambda trial: trial.tail).lr
    return SearchResult(best, [*probes, *trials], run.metric, rounds)


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


def _falling(run: TrialRunner, lr: float, left: int, rounds: int, known: bool) -> list[RateTrial]:
    """Trials at falling rates until the budget is spent; none is longer than the run."""
    trials: list[RateTrial] = []
    longest = min(rounds, left if known else left // EQUAL_TRIALS)
    shortest = min(longest, MIN_BUDGET // 4)
    while left >= max(min(4, longest), shortest):
        length = min(longest, -(-left // 2) if known else left)
        trials.append(run(lr, length, until_settled=known, must_fall=True))
        left -= trials[-1].rounds
        never_fell = trials[-1].diverged and min(trials[-1].values) > run.first / TURNED**0.5
        lr /= math.sqrt(FALL) if never_fell else FALL
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
    left = budget - _spent(probes)
    scan = [
        top,
        *(
            run(top.lr / WIDE**k, probe)
            for k in range(1, min(WIDE, left // probe - EQUAL_TRIALS + 1))
        ),
    ]
    low, seen = (
        min(_fast_enough(scan, rounds)),
        [*(trial for trial in probes if trial is not top), *scan],
    )
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
    falls = [trial.fall() for trial in trials]
    least = min(ALIKE * max(falls), DEEP * trials[0].rounds / rounds if rounds else math.inf)
    return [trial.lr for trial, fall in zip(trials, falls, strict=True) if fall >= least]


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
        return {"loss": loss}


class TrialRunner:
    """Runs trials of one method on one problem, as the first rounds of a run of `rounds`."""

    def __init__(
        self, method: Method[Any, Any, Any, Any], problem: Problem, clients_per_round: int, rounds: int,
        done: Sequence[RateTrial], keep: Callable[[RateTrial], None], participation: Participation | None = None,
    ) -> None:  # fmt: skip
        self.done, self.keep, self.participation = (
            list(done),
            keep,
            participation or Participation(),
        )
        self.method, self.problem = method.without_tests(), problem
        self.clients_per_round, self.rounds = clients_per_round, rounds
        start = problem.evaluate(problem.x0, problem.buffers0)
        self.metric = next(
            (name for name in ("rel_err", "validation_loss") if name in start), TRAINING_LOSS
        )
        if self.metric == TRAINING_LOSS:
            self.problem = cast(Problem, _Untested(problem))
            start = self.problem.evaluate(problem.x0, problem.buffers0)
        self.offset = 0.0
        self.first = self._measure(start)
        if (
            self.first <= 0
        ):  # such as a likelihood of densities: the trials compare multiples of the start
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
        trial = RateTrial(lr, 0, [], [], False)
        with Simulator(method, self.problem, Engine()) as clients:
            loop = Loop(
                method, self.problem, clients, self.problem.seeds, self.clients_per_round, rounds=self.rounds,
                chain=Chain(method, dataclasses.replace(self.participation, screen=None), runs=len(self.problem.seeds)),
                known_start=self.participation.known_start, unbiased=self.participation.unbiased,
            )  # fmt: skip
            for row in loop.rows(rounds, max(1, rounds // POINTS)):
                value = self._measure(row.metrics)
                turned = must_fall and value > max(
                    self.first / 2, TURNED * min(trial.values, default=value)
                )
                bad = bool(row.diverged.any()) or turned or not value < WORSE * self.first
                sent = int(row.up_bytes.sum() + row.down_bytes.sum())
                trial = RateTrial(
                    lr, row.round, [*trial.at, row.round], [*trial.values, value], bad, sent
                )
                if bad or (until_settled and trial.settled):
                    break
        return dataclasses.replace(
            trial, diverged=trial.diverged or (must_fall and trial.tail >= self.first)
        )

    def _measure(self, metrics: Metrics) -> float:
        name = "loss" if self.metric == TRAINING_LOSS else self.metric
        return float(metrics[name].mean()) + self.offset
