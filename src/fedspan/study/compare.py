"""`fedspan.compare` and `fedspan.tune`: the study engine for a model and data as Python objects."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, overload

from rich.console import Console
from torch import nn

from fedspan.api.fit import as_method
from fedspan.core.errors import SpecError, at_least, at_most, path_of, shown, true_or_false
from fedspan.core.signals import ending_by_sigterm
from fedspan.core.spec import Spec
from fedspan.study import command
from fedspan.study.arguments import (
    Grid,
    MethodLike,
    call_as_text,
    named_methods,
    shared_spec,
    variants_of,
)
from fedspan.study.budget import Budget
from fedspan.study.comparison import Comparison, Tuned
from fedspan.study.model import Part, Study
from fedspan.study.proposal import Link, Proposal
from fedspan.study.propose import propose
from fedspan.study.request import prepared
from fedspan.study.results import STUDY


@ending_by_sigterm()
def compare(
    methods: Mapping[str, MethodLike] | Sequence[MethodLike],
    model: nn.Module | Spec | Path | str | Mapping[str, Any],
    clients: Sequence[Any] | Mapping[str, Any] | None = None,
    loss: Any = None,
    *,
    tune: Grid | None = None,
    seeds: int = 3,
    budget: str | Sequence[str] | None = None,
    metric: str | None = None,
    goal: Literal["max", "min"] | None = None,
    tune_seeds: int = 1,
    tune_rounds: int | None = None,
    tail: int = 1,
    jobs: int = 1,
    run_dir: Path | str | None = None,
    resume: bool = False,
    progress: bool = True,
    **settings: Any,
) -> Comparison:
    """Tunes methods, runs them on one problem under the same seeds, and compares them.

    Every run starts from the weights that `model` has now, and `model` itself is not changed. Settings are chosen on
    `validation` if you give it, and otherwise by the training loss on a fixed sample of the clients' data. They are
    never chosen on `test`.

    Args:
        methods: A dictionary of label → method, or a list of methods. A method is a value such as `SSF(rank=0.2)`,
            a name such as "ssf", or a table such as `{"name": "ssf", "rank": 0.2}`.
        model: Any `torch.nn.Module` or Hugging Face model. Or a spec (a `Spec`, the path of a TOML file or a table),
            whose task takes the place of model and data.
        clients: The data of each client, as for `fedspan.fit`.
        loss: `loss(outputs, targets)`, as for `fedspan.fit`.
        tune: Values to tune over: `{"lr": [0.03, 0.1, 0.3]}` for every method, `{"SSF": {"lr": [0.1, 1.0]}}` for the
            one with that label, which replaces the other. Several keys make a grid of all combinations.
            `{"lr": "search"}` searches the step size of every run, which is also what a method without `lr` does.
        seeds: Number of runs per method, with consecutive seeds.
        budget: Compare at this cost: "up=10MB", "total=50MB", "rounds=200", or several of them. By default all
            methods run for `rounds`.
        metric: The metric to compare by; by default the first one of the test set that is no loss. Without a test
            set it is that of the validation set, and without both the training loss.
        goal: Whether a higher ("max") or a lower ("min") metric is better; by default known from its name.
        tune_seeds: Number of seeds in tuning.
        tune_rounds: Rounds per run in tuning; by default as many as in the final runs.
        tail: The result is the mean of so many last evaluations.
        jobs: Number of processes. A run uses one thread of the CPU.
        run_dir: A directory for all runs and results. None keeps the results in memory alone.
        resume: Continue the comparison in `run_dir`, or ask it for more; finished runs are not made again.
        progress: Show a progress bar with what is being run, on stderr.
        **settings: Other arguments of `fedspan.fit`: test, validation, metrics, rounds, batch_size, epochs,
            clients_per_round, eval_every, training, participation, projection, engine, callbacks and so on.

    Returns:
        The comparison.

    Raises:
        FedspanError: An argument cannot be used.
        KeyboardInterrupt: The comparison was interrupted; `resume=True` continues it. SIGTERM ends it as it ends `fit`.
    """
    at_least("jobs", jobs, 1)
    at_most("jobs", jobs, 1000)
    true_or_false("resume", resume)
    true_or_false("progress", progress)
    if not isinstance(metric, str | None) or metric == "":
        raise SpecError(f"`metric` must be the name of a metric, got {shown(metric)}")
    run_dir = None if run_dir is None else path_of("run_dir", run_dir)
    named = named_methods(methods)
    spec = shared_spec(model, clients, loss, next(iter(named.values())), settings)
    part = Part(
        name="comparison",
        base=spec.table(),
        variants=variants_of(named, {} if tune is None else tune),
        seeds=seeds,
        tune_seeds=tune_seeds,
        tune_rounds=tune_rounds,
        tail=tail,
        metric="",
        budget=Budget.parse(budget),
        given=spec,
    )
    study = Study("comparison", [prepared(part, metric, goal)])
    if resume and run_dir is None:
        raise SpecError("`resume` needs the `run_dir` of the comparison to continue")
    if run_dir is not None and (run_dir / STUDY).exists() and not resume:
        raise SpecError(
            f"`run_dir` {str(run_dir)!r} already holds a comparison; give resume=True to continue it, or another one"
        )
    if jobs > 1 and spec.torch_device.type != "cpu":
        raise SpecError(f"`jobs` {jobs} needs device='cpu'; use jobs=1")
    options = {
        "tune": tune,
        "seeds": seeds,
        "budget": budget,
        "metric": metric,
        "goal": goal,
        "tail": tail,
    }
    line = call_as_text(
        named, model, options | settings | {"run_dir": None if run_dir is None else str(run_dir)}
    )
    console = Console(stderr=True, quiet=not progress)
    with _place(run_dir) as place:
        results = command.produce(study, place, jobs=jobs, line=line, console=console)
    return Comparison(dataclasses.replace(results, study=study), run_dir)


@overload
def tune(
    method: MethodLike,
    model: nn.Module | Spec | Path | str | Mapping[str, Any],
    clients: Sequence[Any] | Mapping[str, Any] | None = None,
    loss: Any = None,
    *,
    tune: Grid,
    budget: str | Sequence[str] | None = None,
    progress: bool = True,
    **settings: Any,
) -> Tuned: ...
@overload
def tune(
    method: MethodLike,
    model: nn.Module | Spec | Path | str | Mapping[str, Any],
    clients: Sequence[Any] | Mapping[str, Any] | None = None,
    loss: Any = None,
    *,
    budget: str | Sequence[str],
    link: str | Link | None = None,
    vary: Grid | None = None,
    progress: bool = True,
    **settings: Any,
) -> Proposal: ...
def tune(
    method: MethodLike,
    model: nn.Module | Spec | Path | str | Mapping[str, Any],
    clients: Sequence[Any] | Mapping[str, Any] | None = None,
    loss: Any = None,
    *,
    tune: Grid | None = None,
    budget: str | Sequence[str] | None = None,
    link: str | Link | None = None,
    vary: Grid | None = None,
    progress: bool = True,
    **settings: Any,
) -> Tuned | Proposal:
    """Tunes one method over a grid, or proposes its settings for a budget.

    With `tune` it is `compare` with one method and, by default, one seed. Without it, rank, bits, local steps and
    learning rate are proposed for `budget`: the bytes of every setting are planned from packed messages, its learning
    rate is searched, and all settings race at equal shares of the budget. The test set has no part in the choice.

    Args:
        method: A method such as `SSF(rank=0.2)`, its name, or a table with a name.
        model: A module, or a spec with a task, as for `compare`.
        clients: The data of each client.
        loss: `loss(outputs, targets)`.
        tune: Values to tune over, such as `{"lr": [0.03, 0.1, 0.3], "local_steps": [5, 10]}`.
        budget: What may be spent: "total=50MB", "up=10MB", "rounds=200", with a `link` also "seconds=3600", or several.
        link: How clients are connected, such as "up=1MB,down=4MB,latency=0.1,step=0.02": bytes per second, seconds per
            round besides the transfer, and seconds of a local step on a client's device.
        vary: Values to propose from, such as `{"rank": [0.05, 0.1], "bits": [32, 8], "server_momentum": [0, 0.5]}`. By
            default four ranks and two numbers of bits, then half and twice the local steps.
        progress: Show a progress bar with what is being run, on stderr.
        **settings: Other arguments of `compare` (with `tune`) and `fedspan.fit`.

    Returns:
        The method with its best settings (`.method`), and the results of all that was tried (`.rows`, `.to_pandas()`).
        A proposal also has the `rounds` that the budget allows, and says why (`.summary()`).
    """
    true_or_false("progress", progress)
    if tune is None and budget is not None:
        spec = shared_spec(model, clients, loss, as_method(method), settings)
        return propose(spec, budget, link, vary, Console(stderr=True, quiet=not progress))
    if tune is None or (isinstance(tune, Mapping) and not tune):
        raise SpecError(
            f"`tune` must be a table such as {{'lr': [0.03, 0.1, 0.3]}}, got {shown(tune)}; or leave it out and give a "
            "`budget` such as 'total=50MB', for which settings are proposed"
        )
    if link is not None or vary is not None:
        raise SpecError("`link` and `vary` are for a proposal; leave `tune` out, or leave them out")
    given = {"seeds": 1, "progress": progress, **settings}
    found = compare([method], model, clients, loss, tune=tune, budget=budget, **given)
    return Tuned(next(iter(found.best.values())), found)


@contextmanager
def _place(run_dir: Path | None) -> Iterator[Path]:
    """The directory of the runs; one for the time being where the user names none."""
    if run_dir is not None:
        yield run_dir
    else:
        with tempfile.TemporaryDirectory(prefix="fedspan-") as place:
            yield Path(place)
