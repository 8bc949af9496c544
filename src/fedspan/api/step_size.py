"""A method as a spec runs it on its problem: its local steps, and its step size, which a rule may have to find."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedspan.core.config import Engine, Participation, Search
from fedspan.core.errors import CheckpointError, SpecError, shown
from fedspan.core.files import make_dir, remove
from fedspan.core.json_log import REMEDY, check_form, read_table, write_table
from fedspan.core.method import Method
from fedspan.core.objective import Problem, steps_of
from fedspan.core.spec import Spec
from fedspan.engine.loop import Loop
from fedspan.engine.provenance import CHECKPOINT, LR, TRIALS, read_lr
from fedspan.engine.run_dir import check_vacant
from fedspan.engine.simulator import Simulator
from fedspan.engine.tuner import Trial, find_lr
from fedspan.replies.chain import Chain
from fedspan.theory.diagnosis import corollary_lr

TRAINING_LOSS = "training loss"
MIN_BUDGET = 40  # rounds that a search may always use
TRIAL_RUNS = 8  # trials as long as the run that a search of a very short run may use
WORSE = 2.0  # a trial whose measure is above this multiple of the start has diverged
TURNED = 1.3  # so has one above this multiple of its lowest value and above half the start
POINTS = 30  # evaluations per trial
TRIAL = {
    "lr": float,
    "rounds": int,
    "at": list[int],
    "values": list[Any],
    "diverged": bool,
    "bytes": int,
}


def with_lr(
    spec: Spec, run_dir: Path | None, *, resume: bool
) -> tuple[Spec, dict[str, Any] | None, list[Problem]]:
    """The spec with a number for its step size, how it was found, and the problem that was built for it, if any.

    A resumed run keeps the step size that it was begun with.
    """
    made: list[Problem] = []
    if not isinstance(spec.method.lr, str):
        return spec, None, made
    if run_dir is not None and resume and (run_dir / LR).exists():
        found = read_lr(run_dir / LR)
    else:
        if run_dir is not None:
            if resume and (run_dir / CHECKPOINT).exists():
                raise SpecError(
                    f"`lr` is {spec.method.lr!r}, but the run in {str(run_dir)!r} was begun with a number; give a "
                    "number"
                )
            check_vacant(run_dir)
        method, problem, clients_per_round = built(spec)
        made.append(problem)
        if spec.method.lr == "auto":
            if problem.steps is not None:  # the theory's step is for the client with most steps
                most = int(problem.steps.max())
                method = replace(method, local_steps=most)
            lr, server_lr = corollary_lr(method, problem, clients_per_round, spec.rounds, spec)
            found = {"rule": "auto", "values": {"lr": lr, "server_lr": server_lr}}
        else:
            found = _kept_search(spec, method, problem, clients_per_round, run_dir)
        if run_dir is not None:
            make_dir(run_dir)
            write_table(run_dir / LR, found)
            remove(run_dir / TRIALS)
    values, chosen = found["values"], spec.method
    if "server_lr" in values:
        server = replace(chosen.server, lr=values["server_lr"])  # type: ignore[attr-defined]
        chosen = replace(chosen, server=server)  # type: ignore[type-var]
    chosen = replace(chosen, lr=values["lr"])  # type: ignore[type-var]
    return replace(spec, method=chosen), found, made


def _kept_search(
    spec: Spec, method: Method, problem: Problem, clients_per_round: int, run_dir: Path | None
) -> dict[str, Any]:
    """The search of a spec on its first seed. An interrupted one continues: finished trials are kept in a directory."""
    whose = {"identity": spec.identity(), "rounds": spec.rounds, "seed": spec.seed}
    done: list[Trial] = []
    path = None if run_dir is None else run_dir / TRIALS
    if path is not None and path.exists():
        table = read_table(path, {"trials": list[Any]})
        for one in table["trials"] if whose.items() <= table.items() else ():
            check_form(one, path, TRIAL)
            numbers = sum(type(value) in (int, float) for value in one["values"])
            if not len(one["at"]) == len(one["values"]) == numbers:
                raise CheckpointError(
                    f"{str(path)!r} is damaged: 'values' is {shown(one['values'])}; {REMEDY}"
                )
            done.append(Trial(**{name: one[name] for name in TRIAL}))

    def keep(trials: list[Trial]) -> None:
        if path is not None:
            make_dir(path.parent)
            write_table(path, whose | {"trials": [asdict(one) for one in trials]})

    found = asdict(
        search(
            method, problem, clients_per_round, spec.rounds, spec.search, spec.participation,
            done=done, keep=keep,
        )
    )  # fmt: skip
    return {"rule": "search", "values": {"lr": found.pop("lr")}, **found}


@dataclass(frozen=True)
class SearchResult:
    """The learning rate that a search found, and the trials behind it."""

    lr: float
    metric: str  # what the trials were measured by: "rel_err", "validation_loss" or "training loss"
    rounds: int  # of all trials together
    bytes: int  # that the clients of all trials sent and received
    cost: str  # what the trials took: 5 trials, 75 rounds, 1.2 MB
    trials: list[Trial]


def budget_of(how: Search, rounds: int) -> int:
    """Rounds for all trials: `share` of the run, but at least 40, or 8 times a run of fewer than 5 rounds."""
    return max(int(how.share * rounds), min(MIN_BUDGET, TRIAL_RUNS * rounds))


def search(
    method: Any,
    problem: Any,
    clients_per_round: int,
    rounds: int,
    how: Search | None = None,
    participation: Participation | None = None,
    *,
    done: Sequence[Trial] = (),
    keep: Callable[[list[Trial]], None] = lambda _: None,
) -> SearchResult:
    """The local learning rate for a run of `rounds` rounds; `method.lr` is ignored.

    Trials are the first rounds of such a run. They are measured by the error itself (`rel_err`) if the task knows it,
    else by the loss on validation data, else by the training loss on a fixed sample of the clients' data, and never by
    the test set. They draw nothing from the run's random streams.

    Args:
        method: The method, which is tried as it will run.
        problem: Its problem.
        clients_per_round: Clients that take part in a round.
        rounds: Rounds of the run.
        how: How to search.
        participation: How the run weights its clients.
        done: The trials that an interrupted search of the same run has finished.
        keep: Called with all trials after each further one.
    """
    how, participation = how or Search(), participation or Participation()
    method, finished, trials = method.without_tests(), list(done), list[Trial]()
    start = problem.evaluate(problem.x0, problem.buffers0)
    metric = next((one for one in ("rel_err", "validation_loss") if one in start), TRAINING_LOSS)
    if metric == TRAINING_LOSS:  # a test set is not to be seen
        problem, measure = copy.copy(problem), problem.training_loss

        def evaluate(x: Any, buffers: Any = None) -> dict[str, Any]:
            loss = measure(x, buffers)
            if loss is None:
                raise SpecError(
                    "a search needs an error or a loss to measure; give `method.lr` a number"
                )
            return {TRAINING_LOSS: loss}

        problem.evaluate = evaluate
        start = evaluate(problem.x0, problem.buffers0)
    begun = float(start[metric].mean())
    first = begun if begun > 0 else 1.0

    def measured(value: float) -> float:
        """Trials compare multiples of the start; a log-likelihood of densities may begin below zero."""
        return value if begun > 0 else math.exp(min(value - begun, 100.0))

    def run(lr: float, length: int, must_fall: bool) -> Trial:
        if finished and finished[0].lr == lr:  # a search takes the same steps again
            trials.append(finished.pop(0))
            return trials[-1]
        finished.clear()
        tried = replace(method, lr=lr)
        at, values, bad, sent = list[int](), list[float](), False, 0
        with Simulator(tried, problem, Engine()) as clients:
            loop = Loop(
                tried, problem, clients, problem.seeds, clients_per_round, rounds=rounds,
                chain=Chain(tried, replace(participation, screen=None), runs=len(problem.seeds)),
                known_start=participation.known_start, unbiased=participation.unbiased,
            )  # fmt: skip
            for row in loop.rows(length, max(1, length // POINTS)):
                values.append(measured(float(row.metrics[metric].mean())))
                at.append(row.round)
                sent = int(row.up_bytes.sum() + row.down_bytes.sum())
                turned = must_fall and values[-1] > max(first / 2, TURNED * min(values))
                if bool(row.diverged.any()) or turned or not values[-1] < WORSE * first:
                    bad = True
                    break
        never_fell = must_fall and float(np.mean(values[-max(1, len(values) // 5) :])) >= first
        trials.append(Trial(lr, at[-1], at, values, bad or never_fell, sent))
        keep(trials)
        return trials[-1]

    budget, known = budget_of(how, rounds), metric == "rel_err"
    lr = find_lr(run, rounds, budget, how.start, metric, known)
    took, sent = (sum(getattr(trial, name) for trial in trials) for name in ("rounds", "bytes"))
    cost = f"{len(trials)} trials, {took} rounds, {sent / 1e6:.3g} MB"
    return SearchResult(lr, metric, took, sent, cost, trials)


def built(spec: Spec) -> tuple[Any, Any, int]:
    """(method, problem of the first seed, clients per round); a step size that is to be found is 1."""
    problem = spec.task.build((spec.seed,), spec)
    if isinstance(spec.method.lr, str):
        spec = replace(spec, method=replace(spec.method, lr=1.0))  # type: ignore[type-var]
    method, clients_per_round = resolve(spec, problem)
    method.check(problem.layout)
    return method, problem, clients_per_round


def resolve(spec: Spec, problem: Problem) -> tuple[Method, int]:
    """(method, clients per round) of a spec on its problem.

    `epochs` sets the local steps to so many passes over the mean client's examples, for every client. With
    `training.per_client` each client makes them over its own, and `problem.steps` has their numbers where they differ.
    """
    method, steps = spec.method, spec.method.local_steps
    if spec.epochs is not None and spec.training.per_client:
        own = steps_of(spec.epochs, [problem.batches_of(i) for i in range(problem.clients)])
        problem.steps = own if own.min() < own.max() else None
        steps = steps if problem.steps is not None else int(own[0])
    elif spec.epochs is not None:
        steps = max(1, round(spec.epochs * problem.steps_per_epoch))
    if steps != method.local_steps:
        method = replace(method, local_steps=steps)  # type: ignore[type-var]
    return method, spec.clients_per_round or problem.clients
