"""A method as a spec runs it on its problem: its local steps, and its step size, which a rule may have to find."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fedspan.core.errors import CheckpointError, SpecError, shown
from fedspan.core.files import make_dir, remove
from fedspan.core.json_log import REMEDY, check_form, read_table, write_table
from fedspan.core.method import Method
from fedspan.core.objective import Problem
from fedspan.core.spec import Spec
from fedspan.engine.provenance import CHECKPOINT, LR, TRIALS, read_lr
from fedspan.engine.run_dir import check_vacant
from fedspan.theory.diagnosis import corollary_lr
from fedspan.theory.lr_search import RateTrial, search

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
    path = None if run_dir is None else run_dir / LR
    if path is not None and resume and path.exists():
        found = read_lr(path)
    else:
        if run_dir is not None and resume and (run_dir / CHECKPOINT).exists():
            raise SpecError(
                f"`lr` is {spec.method.lr!r}, but the run in {str(run_dir)!r} was begun with a number; give a number"
            )
        if run_dir is not None:
            check_vacant(run_dir)
        found = _find_lr(spec, run_dir, made)
        if run_dir is not None and path is not None:
            make_dir(run_dir)
            write_table(path, found)
            remove(run_dir / TRIALS)
    values = found["values"]
    method: Any = dataclasses.replace(spec.method, lr=values["lr"])  # type: ignore[type-var]
    if "server_lr" in values:
        server = dataclasses.replace(method.server, lr=values["server_lr"])
        method = dataclasses.replace(method, server=server)
    return dataclasses.replace(spec, method=method), found, made


def _find_lr(spec: Spec, run_dir: Path | None, made: list[Problem]) -> dict[str, Any]:
    """The step size by the spec's rule, on its first seed; finished trials are kept where there is a directory."""
    rule = spec.method.lr
    method, problem, clients_per_round = built(spec)
    made.append(problem)
    if rule == "auto":
        lr, server_lr = corollary_lr(method, problem, clients_per_round, spec.rounds, spec)
        return {"rule": "auto", "values": {"lr": lr, "server_lr": server_lr}}
    with _kept_trials(spec, run_dir) as (done, keep):
        found = search(
            method,
            problem,
            clients_per_round,
            spec.rounds,
            spec.search,
            done,
            keep,
            spec.participation,
        )
    trials = [dataclasses.asdict(trial) for trial in found.trials]
    spent = {
        "metric": found.metric,
        "rounds": found.rounds,
        "bytes": found.bytes,
        "cost": found.cost,
    }
    return {"rule": "search", "values": {"lr": found.lr}, **spent, "trials": trials}


@contextmanager
def _kept_trials(
    spec: Spec, run_dir: Path | None
) -> Iterator[tuple[list[RateTrial], Callable[[RateTrial], None]]]:
    """(finished trials of an interrupted search, what keeps further ones); they are removed where the search fails."""
    if run_dir is None:
        yield [], lambda _: None
        return
    path, whose = (
        run_dir / TRIALS,
        {"identity": spec.identity(), "rounds": spec.rounds, "seed": spec.seed},
    )
    table = read_table(path, {"trials": list[Any]}) if path.exists() else {}
    trials = table["trials"] if {key: table.get(key) for key in whose} == whose else []
    done = [_trial(check_form(trial, path, TRIAL), path) for trial in trials]
    every, fresh = list(done), not run_dir.exists()

    def keep(trial: RateTrial) -> None:
        every.append(trial)
        make_dir(run_dir)
        write_table(path, whose | {"trials": [dataclasses.asdict(one) for one in every]})

    try:
        yield done, keep
    except Exception:
        remove(path)
        if fresh:
            with suppress(OSError):
                run_dir.rmdir()
        raise


def _trial(table: dict[str, Any], path: Path) -> RateTrial:
    if (
        not len(table["at"])
        == len(table["values"])
        == sum(type(one) in (int, float) for one in table["values"])
    ):
        raise CheckpointError(
            f"{str(path)!r} is damaged: 'values' is {shown(table['values'])}; {REMEDY}"
        )
    return RateTrial(**{name: table[name] for name in TRIAL})


def built(spec: Spec) -> tuple[Any, Any, int]:
    """(method, problem of the first seed, clients per round); a step size that is to be found is 1."""
    problem = spec.task.build((spec.seed,), spec)
    if isinstance(spec.method.lr, str):
        spec = dataclasses.replace(spec, method=dataclasses.replace(spec.method, lr=1.0))  # type: ignore[type-var]
    method, clients_per_round = resolve(spec, problem)
    method.check(problem.layout)
    return method, problem, clients_per_round


def resolve(spec: Spec, problem: Problem) -> tuple[Method, int]:
    """(method, clients per round) of a spec on its problem.

    `epochs` sets the local steps to so many passes over the mean client's examples. Every client takes the same
    number, whatever its own amount: controls and averages are of K steps each.
    """
    method = spec.method
    if spec.epochs is not None:
        steps = max(1, round(spec.epochs * problem.steps_per_epoch))
        method = dataclasses.replace(method, local_steps=steps)  # type: ignore[type-var]
    return method, spec.clients_per_round or problem.clients
