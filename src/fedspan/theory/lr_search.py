"""The local step by a short search, for any method: probes down to a rate that holds, then trials at falling rates.

The paper's search takes the rate with the lowest error after 500 rounds. That favors large steps: they are ahead early
and stop at a higher floor. Where the error itself is known (`rel_err`) the trials are read as in `theory.horizon`,
which looks ahead to the end of the run. Where it is not (networks) the trials are equally long and the lowest loss
counts, as in the paper.

A server that scales its own steps (FedAdam) goes nearly as far whatever the local step is: no rate diverges, and at
first all fall alike. There the search goes down, to the lowest rate that will still come far enough by the end of the
run or is as fast as any: its noise is least.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from fedspan.core.config import Search
from fedspan.core.errors import SpecError
from fedspan.core.method import Method
from fedspan.core.objective import Problem
from fedspan.engine.loop import Loop
from fedspan.engine.simulator import Simulator
from fedspan.theory.lr_forecast import Trial, best_rate

LEAST = 40  # rounds below which a search says nothing
WORSE = 2.0  # times the start: an error or loss past this has diverged
TURNED = 1.3  # times the lowest so far, and above half the start: it has fallen and will diverge
FALL = 3.0  # from one trial's rate to the next; less after one that diverged at once
POINTS = 30  # evaluations of a trial
EQUAL = 4  # trials where only the loss is known, or the server scales its steps
ALIKE = 0.9  # of the farthest fall: as fast as that
WIDE = 8  # from one rate to the next where the server scales its steps, and how many of them
DEEP = 8.0  # of the logarithm of an error: a fall that ends in noise


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
    method: Method[Any, Any, Any, Any], problem: Problem, clients_per_round: int, rounds: int, how: Search | None = None
) -> Found:
    """The local step for a run of `rounds` rounds."""
    how = how or Search()
    left = budget = int(how.share * rounds)
    if budget < LEAST:
        raise SpecError(f"a search in {budget} rounds says nothing; make `rounds` or `search.share` larger")
    run = _Runner(method, problem, clients_per_round)
    probes, trials = _highest(run, how.start, max(4, budget // 30), budget // 3), list[Trial]()
    left -= sum(trial.rounds for trial in probes)
    lr, known = probes[-1].lr, run.metric == "rel_err"
    if _indifferent(probes):
        return _lowest(run, probes, budget, rounds if known else 0)
    most = budget if known else left // EQUAL
    while left >= max(4, min(LEAST // 4, most)):
        trials.append(run(lr, min(most, -(-left // 2) if known else left), until_settled=known, must_fall=True))
        left -= trials[-1].rounds
        at_once = trials[-1].diverged and min(trials[-1].values) > run.first / TURNED**0.5
        lr /= math.sqrt(FALL) if at_once else FALL
    edge = min((trial.lr for trial in (*probes, *trials) if trial.diverged), default=math.inf)
    stable = [trial for trial in trials if trial.lr < edge]
    if not stable:
        raise SpecError(f"no rate down to {trials[-1].lr:g} lowers the {run.metric}; set `search.start` lower")
    best = best_rate(stable, rounds) if known else min(stable, key=lambda trial: trial.tail).lr
    return Found(best, [*probes, *trials])


def _highest(run: _Runner, start: float, probe: int, budget: int) -> list[Trial]:
    """Probes by factors of 2, down to the first rate that does not diverge, or up to the last."""
    trials, lr = [run(start, probe)], start
    up = not trials[0].diverged
    while sum(trial.rounds for trial in trials) < budget:
        lr = lr * 2 if up else lr / 2
        trials.append(run(lr, probe))
        if trials[-1].diverged == up or _indifferent(trials):
            break
    if up and trials[-1].diverged:
        trials = [trials[-1], *trials[:-1]]
    if trials[-1].diverged:
        raise SpecError(f"every rate down to {lr:g} diverged in the search; set `search.start` lower")
    return trials


def _indifferent(probes: list[Trial]) -> bool:
    """Whether of the last three rates the largest has fallen as far as the smallest, a quarter of it."""
    last = probes[-3:]
    if len(last) != 3 or any(trial.diverged for trial in last):
        return False
    falls = [trial.fallen(trial.rounds) for trial in last]
    return min(falls) > ALIKE * max(falls) > 0


def _lowest(run: _Runner, probes: list[Trial], budget: int, rounds: int) -> Found:
    """The lowest rate that serves, by short probes far down, then by a few longer trials below the last that did."""
    top, probe = probes[-3], probes[0].rounds
    left = budget - sum(trial.rounds for trial in probes)
    scan = [top, *(run(top.lr / WIDE**k, probe) for k in range(1, min(WIDE, left // probe - EQUAL + 1)))]
    low, seen = min(_serving(scan, rounds)), [*(trial for trial in probes if trial is not top), *scan]
    each = (budget - sum(trial.rounds for trial in seen)) // EQUAL
    longer = [run(low / 2**k, each, must_fall=True) for k in range(EQUAL)]
    stable = [trial for trial in longer if not trial.diverged]
    if not stable:
        raise SpecError(f"no rate around {low:g} lowers the {run.metric}; give `method.lr` a number")
    return Found(min(_serving(stable, rounds)), [*seen, *longer])


def _serving(trials: list[Trial], rounds: int) -> list[float]:
    """The rates of equally long trials that will have come far in so many rounds, or fall nearly as far as any."""
    falls = [trial.fallen(trial.rounds) for trial in trials]
    least = min(ALIKE * max(falls), DEEP * trials[0].rounds / rounds if rounds else math.inf)
    return [trial.lr for trial, fall in zip(trials, falls, strict=True) if fall >= least]


class _Runner:
    """Trials of one method on one problem."""

    def __init__(self, method: Method[Any, Any, Any, Any], problem: Problem, clients_per_round: int) -> None:
        self.method, self.problem, self.clients_per_round = method, problem, clients_per_round
        start = problem.evaluate(problem.x0, problem.buffers0)
        self.metric = next((name for name in ("rel_err", "loss") if name in start), None)
        if self.metric is None:
            raise SpecError("a search needs a task with an error or a loss to go by; give `method.lr` a number")
        self.first = float(start[self.metric].mean())

    def __call__(self, lr: float, rounds: int, until_settled: bool = False, must_fall: bool = False) -> Trial:
        """Some rounds, or until it diverges or has settled; one that `must_fall` and does not counts as diverged."""
        method: Any = dataclasses.replace(self.method, lr=lr)  # type: ignore[type-var]
        trial = Trial(lr, 0, [], [], False)
        with Simulator(method, self.problem) as clients:
            loop = Loop(method, self.problem, clients, self.problem.seeds, self.clients_per_round)
            for row in loop.rows(rounds, max(1, rounds // POINTS)):
                value = float(row.metrics[self.metric or ""].mean())
                turned = must_fall and value > max(self.first / 2, TURNED * min(trial.values, default=value))
                bad = bool(row.diverged.any()) or turned or not value < WORSE * self.first
                trial = Trial(lr, row.round, [*trial.at, row.round], [*trial.values, value], bad)
                if bad or (until_settled and trial.settled):
                    break
        return dataclasses.replace(trial, diverged=trial.diverged or (must_fall and trial.tail >= self.first))
