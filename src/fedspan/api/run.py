"""`run`: a spec to its result."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from fedspan.api.step_size import resolve, with_lr
from fedspan.callbacks._event_log import event_log
from fedspan.callbacks.keep_best import KeepBest
from fedspan.callbacks.progress import Progress
from fedspan.core import refusals, wire
from fedspan.core.bundle import payload
from fedspan.core.callback import Callback
from fedspan.core.errors import (
    CheckpointError,
    SpecError,
    at_least,
    at_most,
    path_of,
    shown,
    true_or_false,
)
from fedspan.core.extras import versions
from fedspan.core.files import removed_on_failure
from fedspan.core.layout import Seeds
from fedspan.core.objective import Problem
from fedspan.core.signals import ending_by_sigterm
from fedspan.core.spec import Spec, as_callbacks
from fedspan.core.terminal import report
from fedspan.engine import history
from fedspan.engine.clock import Clock
from fedspan.engine.loop import Loop
from fedspan.engine.per_client import PerClient, Recorder
from fedspan.engine.provenance import (
    CHECKPOINT,
    LR,
    OUTCOME,
    TRIALS,
    read_outcome,
    signing_key,
    write_outcome,
)
from fedspan.engine.result import Result
from fedspan.engine.run_dir import execute
from fedspan.engine.simulator import Simulator
from fedspan.methods.box import projected_values
from fedspan.nn.problem import TorchProblem
from fedspan.replies.accountant import ExampleEpsilon
from fedspan.replies.chain import Chain
from fedspan.replies.noise import Mechanism

DROWNED = 2.0  # signal to noise over a run below which it hardly learns; 2.2 is that of MNIST by 539 writers at ε = 8
MEANINGLESS = 10  # ε: the odds of a client or an example may change by a factor of over 22,000


@ending_by_sigterm()
def run(
    spec: Spec | Path | str | Mapping[str, Any],
    run_dir: Path | str | None = None,
    *,
    seeds: int = 1,
    resume: bool = False,
    callbacks: Sequence[Callback | str] | Callback | str = (),
    progress: bool = True,
) -> Result:
    """Runs a spec.

    Args:
        spec: A `Spec`, the path of a TOML file, or a table of plain values.
        run_dir: Where history, checkpoints and the model are written. None writes nothing.
        seeds: Number of runs, with consecutive seeds from `spec.seed`.
        resume: Continue the run in `run_dir`, also a finished one to more rounds, and with another `lr`.
        callbacks: Callbacks besides those of the spec.
        progress: Print the settings and every evaluation, with a progress bar on a terminal.

    Returns:
        The result.

    Raises:
        FedspanError: A setting cannot be used; nothing was written.
        KeyboardInterrupt: The run was interrupted by Ctrl-C. What was done so far is in `run_dir`.
        Terminated: The same by SIGTERM in a notebook, or where SIGTERM has a handler of your own that returns.
            Otherwise the process ends by the signal.
    """
    seeds = int(seeds) if isinstance(seeds, np.integer) else seeds
    at_least("seeds", seeds, 1)
    at_most("seeds", seeds, 10_000)
    for name, value in {"resume": resume, "progress": progress}.items():
        true_or_false(name, value)
    spec = as_spec(spec)
    out = None if run_dir is None else path_of("run_dir", run_dir)
    more = as_callbacks(callbacks)
    refusals.check(spec, more)
    _ = spec.torch_device  # refused where torch does not have it
    if resume and out is None:
        raise SpecError("`resume` needs the `run_dir` of the run to continue")
    warmup = getattr(spec.method, "warmup", 0)
    if warmup >= spec.rounds:
        warnings.warn(
            f"`warmup` is {warmup}, but the run has {spec.rounds} rounds: `lr` never rises to its value",
            stacklevel=3,
        )
    if out is not None:
        _check_seeds(out, seeds)
    if out is not None and (out / TRIALS).exists() and not _holds_run(out, (spec.seed,)):
        resume = False  # interrupted in the search, before there was a run to resume
    if progress and isinstance(spec.method.lr, str):
        how = {"search": "short trials", "auto": "an estimate of the problem's constants"}
        report(f"lr = {spec.method.lr!r}: {how[spec.method.lr]} before the run")
    of_runs = tuple(range(spec.seed, spec.seed + seeds))
    new = (lambda: ()) if out is None else (lambda: (out / LR, out / TRIALS, out))
    with removed_on_failure(new, lambda: out is not None and _holds_run(out, of_runs)):
        spec, found, made = with_lr(spec, out, resume=resume)
        rule = None if found is None else found["rule"]
        bar = [Progress(rounds=spec.rounds, lr_rule=rule)] if progress else []
        every = [*spec.callbacks, *more, *bar]
        alone = spec.dp is not None or spec.federation is not None  # secret coins, or one clock
        together = seeds == 1 or (spec.task.several_seeds and not alone)
        result = (_run if together else _one_by_one)(spec, out, of_runs, every, made, resume=resume)
    result.lr_search = found
    return result


def _check_seeds(out: Path, seeds: int) -> None:
    """Refuses a directory with a run of another number of seeds."""
    several = len(list(out.glob(f"seed-*/{history.NAME}")))
    ended = len(read_outcome(out).get("seeds", ())) if several else 0
    held = ended or several or int((out / history.NAME).exists())
    right = several <= seeds > 1 and ended in (0, seeds) if several else seeds == 1
    if held and not right:
        raise CheckpointError(
            f"`seeds` is {seeds}, but {str(out)!r} holds a run of {held}; give the `seeds` that it was begun with, or "
            "choose another `run_dir`"
        )


def _holds_run(out: Path, of_runs: Seeds) -> bool:
    """Whether a directory has something to resume."""
    folders = (out, *(out / f"seed-{seed}" for seed in of_runs))
    return any((folder / CHECKPOINT).exists() for folder in folders)


def as_spec(given: Spec | PathLike[Any] | str | Mapping[Any, Any]) -> Spec:
    """A spec from what a user gives."""
    if isinstance(given, Spec):
        return given
    if isinstance(given, Mapping):
        return Spec.from_table(given)
    if not isinstance(given, str | PathLike):
        raise SpecError(
            f"`spec` must be a Spec, the path of a TOML file or a table, got {shown(given)}"
        )
    return Spec.load(path_of("spec", given))


def _one_by_one(
    spec: Spec,
    out: Path | None,
    of_runs: Seeds,
    callbacks: Sequence[Callback],
    made: list[Problem],
    *,
    resume: bool,
) -> Result:
    """Several seeds of a task that cannot batch them."""
    results: list[Result] = []
    key = None if out is None else signing_key()
    for seed in of_runs:
        folder, states = (
            None if place is None else Path(place, f"seed-{seed}")
            for place in (out, spec.engine.states_dir)
        )
        begun = folder and any((folder / name).exists() for name in (CHECKPOINT, OUTCOME))
        one = replace(spec, seed=seed, engine=replace(spec.engine, states_dir=states))
        going_on = resume and bool(begun)
        results.append(_run(one, folder, (seed,), callbacks, made, resume=going_on, apart=True))
        if not results[-1].finished:
            break
    lines, statuses, weights = (
        [part for one in results for part in getattr(one, name)]
        for name in ("runs", "statuses", "weights")
    )
    rounds = {seed: t for one in results for seed, t in one.model_rounds.items()}
    joined = Result(
        of_runs[: len(results)], lines, statuses, spec.table(), out, results[0].module, weights,
        model_rounds=rounds, usage=results[0].usage,
    )  # fmt: skip
    rows = [{"seed": one.seeds[0], **row} for one in results for row in one.per_client]
    joined.per_client = PerClient(rows, spec.metrics, joined.model_rounds)
    if out is not None and joined.finished:
        write_outcome(out, joined, {"spec": joined.spec, "versions": versions()}, key=key)
    return joined


def _run(
    spec: Spec,
    out: Path | None,
    of_runs: Seeds,
    callbacks: Sequence[Callback],
    made: list[Problem],
    *,
    resume: bool,
    apart: bool = False,
) -> Result:
    """A run on the problem that its step size was found on, or on a new one."""
    problem = made.pop() if made else None
    if problem is None or problem.seeds != of_runs:
        problem = spec.task.build(of_runs, spec)
    method, clients_per_round = resolve(spec, problem)
    refusals.check(replace(spec, method=method), callbacks, problem)
    chain = Chain.of(spec, method, problem.clients, clients_per_round, len(of_runs))
    with Simulator(method, problem, spec.engine, resume=resume) as clients:
        if spec.eval_clients_every is not None:
            # after `KeepBest`: it evaluates the model that is kept
            kept = [n for n, one in enumerate(callbacks, 1) if isinstance(one, KeepBest)]
            recorder, place = Recorder(spec.eval_clients_every, spec.rounds), max(kept, default=0)
            callbacks = [*callbacks[:place], recorder, *callbacks[place:]]
        spent = 0.0
        if spec.dp is not None and spec.dp.level == "example":
            examples = ExampleEpsilon(spec.dp, problem)
            callbacks = [*callbacks, examples]
            spent = examples.epsilon(spec.rounds * method.local_steps)
        elif chain.noise is not None:
            spent = chain.noise.epsilon(spec.rounds)
        if spent > MEANINGLESS:
            warnings.warn(
                f"`privacy` spends ε = {spent:.3g} over the run; above {MEANINGLESS} it promises nothing meaningful: "
                "take more `noise`, fewer rounds or smaller batches or cohorts", stacklevel=4,
            )  # fmt: skip
        clock = None
        if spec.federation is not None:
            at = problem.clients, spec.seed, method.local_steps, problem.names
            clock = Clock(spec.federation, *at)
        loop = Loop(
            method, problem, clients, of_runs, clients_per_round, callbacks, out, clock=clock,
            chain=chain, known_start=spec.participation.known_start, metrics=spec.metrics,
            unbiased=spec.participation.unbiased, on_events=event_log(),
        )  # fmt: skip
        problem.drop_start()
        if chain.noise is not None:
            _warn_of_noise(chain.noise, loop, spec)
        if spec.dp is not None and isinstance(problem, TorchProblem) and not problem.tests:
            warnings.warn(
                "without `test` evaluations are the training loss, which epsilon does not cover; give `test` data that "
                "no client holds", stacklevel=4,
            )  # fmt: skip
        costs = None if out is None else _costs(loop)
        result = execute(loop, spec, resume=resume, apart=apart, costs=costs)
    del loop, clients  # which hold the vectors of the server and of the clients
    if isinstance(problem, TorchProblem):
        result.module = problem.trained(result.weights[0])
    return result


def _costs(loop: Loop) -> dict[str, Any]:
    """What reports show of a run besides its history."""
    method, problem = loop.method, loop.problem
    state = wire.pack(method.init_client(problem.x0[:1], problem.layout)).values()
    costs: dict[str, Any] = {"client_state": sum(array.nbytes for array in state)}
    if (projected := projected_values(method, problem.layout)) is not None:
        costs["projected"] = list(projected)
    if isinstance(problem, TorchProblem) and "test set" in problem.tests:
        costs["test_examples"] = len(problem.tests["test set"].data)
    own = {"clients_per_round": loop.clients_per_round, "local_steps": method.local_steps}
    return costs | own


def _warn_of_noise(noise: Mechanism, loop: Loop, spec: Spec) -> None:
    """Warns where the noise of all rounds is about as large as all that clients can send."""
    sent = payload(loop.empty_reply(loop._round())).values()
    numbers = sum(part.shape[-1] for part in sent)
    in_round, over_run = (noise.signal_to_noise(numbers, rounds) for rounds in (1, spec.rounds))
    if over_run < DROWNED:
        warnings.warn(
            f"with {noise.expected:.4g} clients per round the noise of `privacy` can drown the signal: the "
            f"signal-to-noise ratio is at most {in_round:.2g} in a round and {over_run:.2g} over the run; take more "
            "clients, fewer parameters or a larger epsilon (`fedspan plan` shows what each gives)",
            stacklevel=5,
        )
