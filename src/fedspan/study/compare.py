"""`fedspan.compare` and `fedspan.tune`: the study engine for a model and data as Python objects."""

from __future__ import annotations

import dataclasses
import html
import inspect
import math
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from rich.console import Console
from torch import nn

from fedspan.api.fit import as_method, check_names, spec_of
from fedspan.api.run import as_spec
from fedspan.compressors import QSGD
from fedspan.core import registry
from fedspan.core.errors import (
    SpecError,
    at_least,
    at_most,
    items,
    one_of,
    path_of,
    shown,
    true_or_false,
)
from fedspan.core.extras import data_frame, needs
from fedspan.core.files import make_dir, write_atomic
from fedspan.core.method import Method
from fedspan.core.signals import ending_by_sigterm
from fedspan.core.spec import Spec, with_values
from fedspan.core.tables import describe
from fedspan.core.terminal import plain
from fedspan.downlinks import Changes
from fedspan.study import tables
from fedspan.study.budget import Budget
from fedspan.study.conduct import conduct
from fedspan.study.model import Part, objects_of
from fedspan.study.model import settings as in_words
from fedspan.study.report import Report, of_study
from fedspan.study.request import asked
from fedspan.study.results import Entry, Results, short
from fedspan.uplinks import Plain

MethodLike = Method | str | Mapping[str, Any]
ModelLike = nn.Module | Spec | Path | str | Mapping[str, Any]
Clients = Sequence[Any] | Mapping[str, Any]
Grid = Mapping[str, Any]
FIELDS = {one.name for one in dataclasses.fields(Spec)} - {"method", "task"}
AXES = ("round", "up_bytes", "total_bytes", "seconds", "hours")
WIDTH = 80  # columns of a terminal, in which no word is to be broken
# what is proposed for a budget
RANKS = (0.05, 0.1, 0.2, 0.5)
FEWEST = 8  # rounds below which a rank is not tried
BITS = QSGD(bits=8, bucket=256)


@dataclass(frozen=True, eq=False)
class Comparison:
    """Methods that were tuned and run on one problem under the same seeds.

    Attributes:
        results: Everything that is known, as the study engine has it.
        run_dir: The directory with all runs and the data of the results, or None.
    """

    results: Results
    run_dir: Path | None = None

    @cached_property
    def _report(self) -> Report:
        return of_study(self.results)

    @property
    def _part(self) -> Part:
        return self.results.study.parts[0]

    @property
    def _entries(self) -> list[Entry]:
        return self.results.entries[self._part.name]

    @property
    def metric(self) -> str:
        """The metric that the methods are compared by."""
        return self._part.metric

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One dictionary per method: its result as mean and standard deviation over seeds, its settings and costs."""
        return tables.rows(self._part, self._entries)

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """Label → the tuned settings of the method, such as `{"lr": 0.1}`; a searched step is the first seed's."""
        return {entry.label: entry.settings for entry in self._entries}

    @property
    def best(self) -> dict[str, Method]:
        """Label → the method with its tuned settings, ready for `fedspan.fit(..., method=...)`."""
        found = {}
        for variant in self._part.variants:
            tuned = {k: v for k, v in self.settings[variant.label].items() if k != "epochs"}
            found[variant.label] = as_method(with_values(variant.table["method"], tuned))
        return found

    @property
    def tried(self) -> list[dict[str, Any]]:
        """One dictionary per point of every grid: its settings, and its result in tuning."""
        name = self._part.tune_metric
        return [
            {
                "method": entry.label,
                **short(one.point),
                "rounds": one.rounds,
                name: one.end.mean,
                "diverged": one.end.diverged,
                "failed": one.end.failed,
                "stopped_early": one.dropped,
                "chosen": one.point == entry.point,
            }
            for entry in self._entries
            for one in entry.tried
        ]

    def verdict(self) -> str:
        """Which method to take, by how much, and whether the seeds support it."""
        return " ".join(self._report.verdict)

    def to_pandas(self) -> Any:
        """`rows` as a pandas DataFrame."""
        return data_frame(self.rows)

    def plot(self, x: str = "total_bytes", metric: str | None = None, ax: Any = None) -> Any:
        """Draws a metric of all methods: lines are means over seeds, bands go from the lowest to the highest seed.

        Args:
            x: What it is drawn against: "round", "up_bytes", "total_bytes", "seconds", or the "hours" of a federation.
            metric: The metric; by default the one that the methods are compared by.
            ax: A matplotlib axis to draw on; by default a new figure.

        Returns:
            The matplotlib axis.
        """
        one_of("x", x, AXES)
        axis: Any = x.removesuffix("_bytes")
        if any(math.isnan(one.series.spent[axis][-1]) for one in self._entries):
            raise SpecError(f"`x` is {x!r}, which only runs with a `federation` count; give one")
        metric = metric or self.metric
        one_of("metric", metric, self._entries[0].series.metrics)
        needs("plot", "matplotlib")
        from fedspan.study import figures

        return figures.compare(self._part, self._entries, axis, metric, ax)

    def page(self, path: Path | str) -> Path:
        """Writes the page of the comparison, one HTML file that loads nothing from the network.

        Args:
            path: The file, such as "out/index.html".

        Returns:
            The path.
        """
        needs("plot", "jinja2")
        from fedspan.study import page

        path = path_of("path", path)
        if path.is_dir():
            raise SpecError(
                f"`path` {str(path)!r} is a directory; give a file such as 'out/index.html'"
            )
        make_dir(path.parent)
        write_atomic(path, page.render(self._report).encode())
        return path

    def __repr__(self) -> str:
        table = self._report.sections[0].tables[0]
        lines = [line[:3] for line in (table.header, *table.texts())]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [" ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        return plain("\n".join([*text, *self._notes, textwrap.fill(self.verdict(), WIDTH)]))

    def _repr_html_(self) -> str:
        """The main table and the verdict, for notebooks."""
        table = self._report.sections[0].tables[0]
        rows = ""
        for line in (table.header, *table.texts()):
            rows += f"<tr>{''.join(f'<td>{html.escape(text)}</td>' for text in line)}</tr>"
        words = "".join(f"<p>{html.escape(text)}</p>" for text in (*self._notes, self.verdict()))
        return f"<table>{rows}</table>{words}"

    @property
    def _notes(self) -> list[str]:
        """What went wrong in the runs, such as a reply that was left out."""
        return [note for entry in self._entries for note in entry.notes]


@ending_by_sigterm()
def compare(
    methods: Mapping[str, MethodLike] | Sequence[MethodLike],
    model: ModelLike,
    clients: Clients | None = None,
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
    out = None if run_dir is None else path_of("run_dir", run_dir)
    named = named_methods(methods)
    spec = shared_spec(model, clients, loss, next(iter(named.values())), settings)
    table = {
        "base": spec.table(),
        "variants": {label: {"method": describe(one)} for label, one in named.items()},
        "seeds": seeds,
        "tune_seeds": tune_seeds,
        "tune_rounds": tune_rounds,
        "tail": tail,
        "metric": "",
        "budget": budget,
    }
    objects = objects_of(spec)
    study = asked(table, {} if tune is None else tune, metric, goal, objects=objects)
    if resume and out is None:
        raise SpecError("`resume` needs the `run_dir` of the comparison to continue")
    if jobs > 1 and spec.torch_device.type != "cpu":
        raise SpecError(f"`jobs` {jobs} needs device='cpu'; use jobs=1")
    console = Console(stderr=True, quiet=not progress)
    # a directory for the time being where the user names none
    with nullcontext(out) if out else TemporaryDirectory(prefix="fedspan-") as place:
        found = conduct(study, Path(place), jobs=jobs, resume=resume, console=console)
    return Comparison(dataclasses.replace(found, study=study), out)


def named_methods(methods: Mapping[str, MethodLike] | Sequence[MethodLike]) -> dict[str, Method]:
    """Label → method; methods without labels have their names, numbered where one occurs twice."""
    if not isinstance(methods, Mapping):
        found: dict[str, Method] = {}
        for one in map(as_method, items("methods", methods, "methods")):
            name = registry.name_of(one)
            count = sum(type(other) is type(one) for other in found.values())
            found[f"{name}-{count + 1}" if count else name] = one
        methods = found
    if not methods:
        raise SpecError("`methods` is empty; give at least one method")
    for label in map(str, methods):
        if not label.strip() or not label.isprintable() or len(label) > 100:
            raise SpecError(
                f"a label of `methods` must be up to 100 characters on one line, got {shown(label)}"
            )
    return {str(label): as_method(one) for label, one in methods.items()}


def shared_spec(
    model: Any, clients: Any, loss: Any, method: Any, settings: Mapping[str, Any]
) -> Spec:
    """The spec that all methods share."""
    if isinstance(model, nn.Module):
        if clients is None:
            raise SpecError("`clients` is missing; give the data of each client")
        known = {*inspect.signature(spec_of).parameters, *FIELDS} - {"method", "settings"}
        check_names(settings, known, method)
        return spec_of(model, clients, loss, method=method, **settings)
    plain_spec = isinstance(model, Spec | Mapping | str | PathLike)
    if not plain_spec or clients is not None or loss is not None:
        raise SpecError(
            "`model` must be a torch.nn.Module with `clients`, or a spec without clients and loss, got "
            f"{shown(model)}"
        )
    check_names(settings, FIELDS, method)
    given = {name: value for name, value in settings.items() if value is not None}
    return dataclasses.replace(as_spec(model), method=method, **given)


@dataclass(frozen=True, eq=False)
class Tuned:
    """What `fedspan.tune` returns.

    Attributes:
        method: The method with its best settings and learning rate.
        settings: The settings that were chosen.
        rounds: The rounds of a run with it.
        rows: One dictionary per setting that was tried, as in `Comparison.tried`.
        comparison: The runs behind the choice.
    """

    method: Method
    settings: dict[str, Any]
    rounds: int
    rows: list[dict[str, Any]]
    comparison: Comparison

    @property
    def metric(self) -> str:
        """The metric that the settings were compared by."""
        return self.comparison._part.tune_metric

    def to_pandas(self) -> Any:
        """`rows` as a pandas DataFrame."""
        return data_frame(self.rows)

    def summary(self) -> str:
        """The choice and its result in a few lines."""
        chosen = f"{in_words(self.settings)}: {self.rounds} rounds"
        texts = [chosen, *self.comparison._report.verdict]
        return plain("\n".join(textwrap.fill(text, WIDTH) for text in texts))

    def __repr__(self) -> str:
        return f"Tuned({self.method})\n{self.summary()}"


def tune(
    method: MethodLike,
    model: ModelLike,
    clients: Clients | None = None,
    loss: Any = None,
    *,
    tune: Grid | None = None,
    budget: str | Sequence[str] | None = None,
    **settings: Any,
) -> Tuned:
    """Tunes one method over a grid, or over the settings that a budget depends on.

    It is `compare` with one method and, by default, one seed. Without `tune` it proposes rank, bits, local steps and
    learning rate for `budget`: ranks that allow at least 8 rounds, half and twice the local steps, 8 bits in both
    directions if the method sends plain values and logs its changes, and a learning rate that is searched for each.
    The test set has no part in the choice.

    Args:
        method: A method such as `SSF(rank=0.2)`, its name, or a table with a name.
        model: A module, or a spec with a task, as for `compare`.
        clients: The data of each client.
        loss: `loss(outputs, targets)`.
        tune: Values to tune over, such as `{"lr": [0.03, 0.1, 0.3], "local_steps": [5, 10]}`.
        budget: What may be spent: "total=50MB", "up=10MB", "rounds=200", or several.
        **settings: Other arguments of `compare` and `fedspan.fit`.

    Returns:
        The method with its best settings (`.method`), the `rounds` of its run, the results of all that was tried
        (`.rows`, `.to_pandas()`), and the result in words (`.summary()`).
    """
    own = as_method(method)
    methods = {registry.name_of(own): own}
    if tune is None and budget is not None:
        names = {*inspect.signature(compare).parameters}
        shared = {key: value for key, value in settings.items() if key not in names}
        spec = shared_spec(model, clients, loss, own, shared)
        methods, tune = _proposed(spec, Budget.parse(budget))
    if not isinstance(tune, Mapping) or not tune:
        raise SpecError(
            f"`tune` must be a table such as {{'lr': [0.03, 0.1, 0.3]}}, got {shown(tune)}; or leave it out and give a "
            "`budget` such as 'total=50MB', for which settings are proposed"
        )
    given = {"seeds": 1, **settings}
    found = compare(methods, model, clients, loss, tune=tune, budget=budget, **given)
    part = found._part

    def result(entry: Entry) -> float:
        ends = [one.end for one in entry.tried if one.point == entry.point]
        return part.rank(ends[0]) if ends else 0.0  # there is one setting

    best = max(found._entries, key=result)
    rows = [row | {"chosen": row["chosen"] and row["method"] == best.label} for row in found.tried]
    rounds = int(best.curve(part).rounds[-1])
    return Tuned(found.best[best.label], found.settings[best.label], rounds, rows, found)


def _proposed(spec: Spec, budget: Budget | None) -> tuple[dict[str, Method], Grid]:
    """Return methods and the grid over which they are tuned for a budget."""
    if budget is None:
        raise SpecError("`budget` is empty; give one such as 'total=50MB'")
    method: Any = spec.method
    methods: dict[str, Method] = {registry.name_of(method): method}
    grid: dict[str, Any] = {"lr": "search"}
    if spec.epochs is None:
        k = method.local_steps
        grid["local_steps"] = sorted({max(1, k // 2), k, 2 * k})
    if hasattr(method, "rank") and hasattr(getattr(method, "space", None), "rank"):
        ranks = {rank: dataclasses.replace(method, rank=rank) for rank in RANKS}
        grid["rank"] = [
            rank
            for rank, one in ranks.items()
            if budget.allowed(dataclasses.replace(spec, method=one)) >= FEWEST
        ]
        if not grid["rank"]:
            raise SpecError(f"no rank has {FEWEST} rounds within the budget; give a larger one")
    axes = [getattr(method, axis, None) for axis in ("uplink", "downlink")]
    if method.controls and axes == [Plain(), Changes()]:
        coded = dataclasses.replace(method, uplink=BITS, downlink=BITS)
        methods[f"{registry.name_of(method)}, {BITS.bits} bits"] = coded
    return methods, grid
