"""The command line: parse, call, print. No logic."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import fedspan
from fedspan.core.errors import FedspanError

if TYPE_CHECKING:
    from fedspan.runtimes.folder import Result
    from fedspan.runtimes.loop import Row
    from fedspan.theory.theorem import Condition

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=fedspan.__doc__)
console = Console()


class Ways(StrEnum):
    """How a cohort is worked through."""

    auto = "auto"
    loop = "loop"
    batched = "batched"
    pool = "pool"


class Goals(StrEnum):
    """What is better."""

    max = "max"
    min = "min"


Out = Annotated[Path, typer.Option("--out", help="Folder for the results.")]
Changes = Annotated[list[str] | None, typer.Option("--set", help="Change a key of the spec: --set method.lr=0.1")]
Seeds = Annotated[
    int, typer.Option("--seeds", help="Number of seeds: one batched computation where the task can, else one by one.")
]
Threads = Annotated[int, typer.Option("--threads", help="Threads a process; small problems are fastest with one.")]

Jobs = Annotated[int, typer.Option("--jobs", help="Processes at once.")]
Plugin = Annotated[list[Path] | None, typer.Option("--plugin", help="A Python file that registers a method of yours.")]


@app.command()
def run(
    spec: Annotated[Path, typer.Argument(help="The spec, a TOML file.")],
    out: Out,
    changes: Changes = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    seeds: Seeds = 1,
    plugin: Plugin = None,
    threads: Threads = 1,
    simulate: Annotated[
        Ways, typer.Option("--simulate", help="How a cohort of networks is worked through; auto times them.")
    ] = Ways.auto,
    trail: Annotated[
        bool, typer.Option("--trail", help="Keep clients' controls as the r numbers of each round they took part in.")
    ] = False,
    log: Annotated[
        list[str] | None, typer.Option("--log", help="Log rows to tensorboard or wandb (offline), in OUT.")
    ] = None,
) -> None:
    """Run one spec; rows go to OUT/history.jsonl as they come."""
    import torch

    from fedspan import experiment
    from fedspan.core import registry

    torch.set_num_threads(threads)
    for path in plugin or []:
        registry.load_file(path)
    loaded = experiment.Spec.load(spec, tuple(changes or ()))
    if loaded.lr_from is not None:
        with console.status(f"lr = {loaded.lr_from}"):
            loaded = experiment.settle(loaded, out, resume=resume)
        console.print(f"lr = {loaded.method.lr:.4g}; how it was found: {out / experiment.FOUND}", highlight=False)
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(registry.name_of(loaded.method), total=loaded.rounds)

        def show(row: Row) -> None:
            values = "  ".join(f"{name} {value.mean():.3g}" for name, value in row.metrics.items())
            progress.update(bar, completed=row.round, description=values)

        result = experiment.run(
            loaded, out, seeds=seeds, resume=resume, simulate=simulate.value, trail=trail, on_row=show, log=log or ()
        )
    _print_result(result, out)
    if not result.finished:
        raise typer.Exit(130)


@app.command("list")
def list_() -> None:
    """Methods, projectors, compressors and tasks that a spec can name."""
    from fedspan.core import registry

    for kind in registry.KINDS:
        table = Table("name", "what it is", title=f"{kind}s", title_justify="left", box=None, header_style="dim")
        for name, cls in registry.choices(kind).items():
            table.add_row(f"[bold]{name}", registry.summary(cls))
        console.print(table, "")


@app.command()
def reproduce(
    study: Annotated[str, typer.Argument(help="Which study: toy, mnist, cifar100 or theory.")],
    out: Out,
    scale: Annotated[
        str | None, typer.Option("--scale", help="How much: smoke, laptop or paper; what is usual for the study.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Short for --scale smoke.")] = False,
    seeds: Annotated[int | None, typer.Option("--seeds", help="Number of seeds; what is usual for the scale.")] = None,
    jobs: Jobs = 1,
    again: Annotated[bool, typer.Option("--again", help="Forget earlier results in OUT.")] = False,
) -> None:
    """Regenerate a study: tables, figures and one page. What is done already is not run again."""
    from fedspan.paper import benchmark, reproduction, trial
    from fedspan.paper.study import Study, kind

    scale = "smoke" if quick else scale
    if kind(study) == "tables":
        reproduction.reproduce(Study.load(study, seeds, scale), out, jobs=jobs, again=again, console=console)
    elif kind(study) == "trial":
        trial.reproduce(trial.Trial.load(study, scale, seeds), out, jobs=jobs, again=again, console=console)
    else:
        benchmark.reproduce(benchmark.Benchmark.load(study, scale, seeds), out, jobs=jobs, again=again, console=console)


@app.command()
def compare(
    specs: Annotated[list[Path], typer.Argument(help="Specs of different methods on one task, or one to start from.")],
    out: Out,
    methods: Annotated[
        list[str] | None,
        typer.Option("--methods", help="Methods to compare: fedavg,ssf:rank=0.05,control=paper as SSF small"),
    ] = None,
    grid: Annotated[
        list[str] | None, typer.Option("--grid", help="Values to tune over: lr=0.01,0.1 or ssf:lr=0.1,1.0")
    ] = None,
    budget: Annotated[
        list[str] | None, typer.Option("--budget", help="Compare at this cost: up=10MB, total=50MB or rounds=200")
    ] = None,
    changes: Changes = None,
    seeds: Annotated[int | None, typer.Option("--seeds", help="Number of seeds; 3 unless it is said.")] = None,
    tune_seeds: Annotated[int | None, typer.Option("--tune-seeds", help="Seeds that decide the tuning; 1.")] = None,
    tune_rounds: Annotated[
        int | None, typer.Option("--tune-rounds", help="Rounds of a run in tuning; as long as the runs themselves.")
    ] = None,
    tail: Annotated[int | None, typer.Option("--tail", help="Last evaluations whose mean is the result; 1.")] = None,
    metric: Annotated[
        str | None, typer.Option("--metric", help="Compare by this: accuracy, or else the error.")
    ] = None,
    goal: Annotated[Goals | None, typer.Option("--goal", help="Whether more or less of the metric is better.")] = None,
    jobs: Jobs = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the comparison in --out.")] = False,
    formats: Annotated[str, typer.Option("--format", help="What to write.")] = "html,md,csv",
    plugin: Plugin = None,
) -> None:
    """Run methods side by side on one task, each tuned over its own grid: a page and tables."""
    from fedspan.compare import command
    from fedspan.compare.request import requested
    from fedspan.core import registry

    for path in plugin or []:
        registry.load_file(path)
    plan = requested(
        specs,
        methods=methods or (),
        grids=grid or (),
        budget=budget or (),
        changes=changes or (),
        seeds=seeds,
        tune_seeds=tune_seeds,
        tune_rounds=tune_rounds,
        metric=metric,
        goal=None if goal is None else goal.value,
        tail=tail,
    )
    command.compare(
        plan,
        out,
        jobs=jobs,
        resume=resume,
        formats=formats.split(","),
        line=_line(),
        console=console,
        plugins=tuple(plugin or ()),
    )


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders that runs were written to, of any kind.")],
    out: Out,
    formats: Annotated[str, typer.Option("--format", help="What to write: html, md, csv.")] = "html",
    metric: Annotated[
        str | None, typer.Option("--metric", help="Show this first: accuracy, or else the error.")
    ] = None,
) -> None:
    """Show runs on one self-contained page: against rounds, bytes and seconds, with the table of results."""
    from fedspan.compare import report as reports

    for path in reports.report(folders, out, formats.split(","), metric, _line()):
        console.print(path, highlight=False, soft_wrap=True)


def _line() -> str:
    """The command as it was given."""
    return shlex.join(["fedspan", *sys.argv[1:]])


@app.command()
def partition(
    spec: Annotated[Path, typer.Argument(help="The spec, a TOML file.")],
    out: Annotated[Path, typer.Option("--out", help="The picture: .png, .svg or .pdf.")],
    changes: Changes = None,
) -> None:
    """Draw which client holds how many examples of which class."""
    import numpy as np

    from fedspan import experiment
    from fedspan.core.extras import needs

    needs("plot", "matplotlib")
    from fedspan.compare import heatmap

    loaded = experiment.Spec.load(spec, tuple(changes or ()))
    counts = loaded.task.counts(loaded.seed)
    sizes, kinds = counts.sum(1), (counts > 0).sum(1)
    title = f"{len(counts)} clients, {counts.shape[1]} classes, {counts.sum():,} examples"
    path = heatmap.draw(counts, title, out)
    for name, values in (("examples", sizes), ("classes", kinds)):
        low, middle, high = np.percentile(values, [0, 50, 100])
        console.print(f"{name} a client: {low:.0f} to {high:.0f}, median {middle:.0f}", highlight=False)
    console.print(f"{title}; drawn in {path}", highlight=False)


@app.command()
def plan(spec: Annotated[Path, typer.Argument(help="The spec, a TOML file.")], changes: Changes = None) -> None:
    """What a run of this spec will cost in bytes, memory and disk, for every method side by side."""
    from fedspan import experiment

    loaded = experiment.Spec.load(spec, tuple(changes or ()))
    layout, costs = experiment.plan(loaded)
    console.print(f"{layout.size:,} numbers in {len(layout.blocks)} tensors; {loaded.rounds:,} rounds", highlight=False)
    table = Table("method", box=None, header_style="dim", padding=(0, 1, 0, 0))
    for head in ("up", "down", "up, run", "down, run", "state", "disk", "server", "copies"):
        table.add_column(head, justify="right")
    for name, cost in costs.items():
        table.add_row(name, *(_size(value) for value in cost.sizes()))
    console.print(table)
    console.print(
        "up, down: one client and round; run: all clients and rounds; state, disk: of one client; server: model, "
        "controls and log; copies: of all clients' states, on the server's disk",
        highlight=False,
    )


@app.command()
def diagnose(
    spec: Annotated[Path, typer.Argument(help="The spec, a TOML file.")],
    changes: Changes = None,
    target: Annotated[
        float | None, typer.Option("--target", help="‖∇F‖ to forecast; a tenth of that at the start.")
    ] = None,
    threads: Threads = 1,
) -> None:
    """Hold a spec's step sizes against the convergence theory: conditions, safe steps, rounds and bytes to a target."""
    import torch

    from fedspan import experiment

    torch.set_num_threads(threads)
    found = experiment.examine(experiment.Spec.load(spec, tuple(changes or ())), target)
    known = found.estimates
    rows = {"L = max L_i": known.L, "L of F": known.L_mean, "σ²": known.sigma2, "Δ_F": known.gap, "C_0": known.control}
    rows["‖∇F(x⁰)‖²"] = known.grad_sq
    console.print(_listed(("estimate", "value", "how"), [(k, f"{e.value:.4g}", e.note) for k, e in rows.items()]), "")
    checked = [(c.name, f"{c.value:.3g}", f"{c.limit:.3g}", _met(c)) for c in found.conditions]
    checked += [(f"enough: {c.name}", f"{c.value:.3g}", f"{c.limit:.3g}", _met(c)) for c in found.proved]
    console.print(_listed(("condition", "value", "limit", "holds"), checked), "")
    own, safe, steps = found.steps, found.safe, found.setting.local_steps
    lines = [(n, f"{s.local:.3g}", f"{s.server(steps):.3g}", f"{s.effective:.3g}") for n, s in
             (("of the spec", own), ("safe: the corollary's", safe))]  # fmt: skip
    console.print(_listed(("steps", "η_l = lr", "η_g = server_lr", "η̃"), lines))
    console.print(
        f"after {found.setting.rounds:,} rounds the safe steps promise min ‖∇F‖² ≤ {found.bound:.3g} "
        f"(as printed; as proved {found.bound_proved:.3g})\n", highlight=False, soft_wrap=True,
    )  # fmt: skip
    console.print(f"promised rounds and bytes until ‖∇F‖ ≤ {found.target:.3g}", highlight=False)
    ahead = [(f"{f.rho:g}", f"{f.printed:.3g}", f"{f.rounds:.3g}", _size(f.up), _size(f.down)) for f in found.forecast]
    console.print(_listed(("ρ", "rounds, as printed", "as proved", "up", "down"), ahead))
    for warning in found.warnings:
        console.print("[yellow]outside the theory[/]:", escape(warning), highlight=False, soft_wrap=True)


def _listed(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(*heads, box=None, header_style="dim", padding=(0, 1, 0, 0))
    for row in rows:
        table.add_row(*row)
    return table


def _met(condition: Condition) -> str:
    return "[green]yes[/]" if condition.holds else f"[red]no[/], {condition.excess:.3g} times over"


def _size(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} PB"


@app.command()
def version() -> None:
    """The versions that a run's numbers depend on."""
    from fedspan.runtimes.folder import versions

    console.print("  ".join(f"{name} {number}" for name, number in versions().items()), highlight=False)


def _print_result(result: Result, out: Path) -> None:
    from fedspan.runtimes.history import PLAIN

    table = Table(box=None, header_style="dim")
    metrics = [k for k in result.rows[0][-1] if k not in PLAIN]
    for name in ("seed", "status", "round", *metrics, "up", "down", "seconds"):
        table.add_column(name, justify="left" if name == "status" else "right")
    for number, seed in enumerate(result.seeds):
        last = result.rows[number][-1]
        values = ["-" if last[name] is None else f"{last[name]:.4g}" for name in metrics]
        sizes = [f"{last[name] / 1e6:.2f} MB" for name in ("up_bytes", "down_bytes")]
        table.add_row(str(seed), result.status(number), str(last["round"]), *values, *sizes, f"{last['seconds']:.1f}")
    console.print(table)
    console.print(f"results in {out}", highlight=False)


def main() -> None:
    """Run the command line; a user's mistake is one line, never a traceback."""
    try:
        app()
    except FedspanError as error:
        Console(stderr=True).print("[bold red]error[/]:", escape(str(error)), highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
