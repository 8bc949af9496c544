"""The command line: parse, call, print. No logic."""

from __future__ import annotations

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import fedspan
from fedspan.cli import printing
from fedspan.core.errors import FedspanError

if TYPE_CHECKING:
    from fedspan.engine.loop import Row

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=fedspan.__doc__)
console = Console()


class Ways(StrEnum):
    """How a cohort is worked through."""

    auto = "auto"
    loop = "loop"
    batched = "batched"
    pool = "pool"


class Types(StrEnum):
    """Types of weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class Optimizers(StrEnum):
    """Of local steps."""

    sgd = "sgd"
    momentum = "momentum"
    adamw = "adamw"


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
    compact_states: Annotated[
        bool, typer.Option("--trail", help="Keep clients' controls as the r numbers of each round they took part in.")
    ] = False,
    log: Annotated[
        list[str] | None, typer.Option("--log", help="Log rows to tensorboard or wandb (offline), in OUT.")
    ] = None,
) -> None:
    """Run one spec; rows go to OUT/history.jsonl as they come."""
    import torch

    from fedspan.api import spec as experiment
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
            loaded,
            out,
            seeds=seeds,
            resume=resume,
            simulate=simulate.value,
            compact_states=compact_states,
            on_row=show,
            log=log or (),
        )
    printing.result(result, out, console)
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
    study: Annotated[str, typer.Argument(help="Which study: toy, mnist, cifar100, nlp or theory.")],
    out: Out,
    scale: Annotated[
        str | None, typer.Option("--scale", help="How much: smoke, laptop, paper or full; what is usual for the study.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Short for --scale smoke.")] = False,
    seeds: Annotated[int | None, typer.Option("--seeds", help="Number of seeds; what is usual for the scale.")] = None,
    jobs: Jobs = 1,
    again: Annotated[bool, typer.Option("--again", help="Forget earlier results in OUT.")] = False,
) -> None:
    """Regenerate a study: tables, figures and one page. What is done already is not run again."""
    from fedspan.study import paper_benchmark as benchmark
    from fedspan.study import paper_reproduction as reproduction
    from fedspan.study import paper_trial as trial
    from fedspan.study.paper_study import Study, kind

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
    from fedspan.core import registry
    from fedspan.study import command
    from fedspan.study.request import requested

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
    from fedspan.study import report as reports

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

    from fedspan.api import spec as experiment
    from fedspan.core.extras import needs

    needs("plot", "matplotlib")
    from fedspan.study import heatmap

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
def plan(
    spec: Annotated[Path | None, typer.Argument(help="The spec, a TOML file; or give --model.")] = None,
    changes: Changes = None,
    methods: Annotated[
        str | None, typer.Option("--methods", help="Names such as ssf,fedavg; all for a spec, five for a model.")
    ] = None,
    plugin: Plugin = None,
    model: Annotated[
        Path | None, typer.Option("--model", help="A Hugging Face model's directory or its config.json.")
    ] = None,
    rank: Annotated[float | None, typer.Option("--rank", help="SSF's rank: a share of a layer's inputs.")] = None,
    trained: Annotated[int | None, typer.Option("--trained", help="Numbers that SSF and LoRA train.")] = None,
    lora_rank: Annotated[int, typer.Option("--lora-rank", help="Otherwise as many as LoRA at this rank.")] = 8,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Texts per batch.")] = 16,
    length: Annotated[int, typer.Option("--length", help="Tokens per text.")] = 64,
    dtype: Annotated[Types, typer.Option("--dtype", help="Type of the weights.")] = Types.float32,
    rounds: Annotated[int, typer.Option("--rounds", help="Number of rounds.")] = 100,
    clients: Annotated[int, typer.Option("--clients", help="Number of clients.")] = 10,
    clients_per_round: Annotated[
        int | None, typer.Option("--clients-per-round", help="Clients per round; all by default.")
    ] = None,
    freeze: Annotated[list[str] | None, typer.Option("--freeze", help="Pattern of tensors not to train.")] = None,
    optimizer: Annotated[Optimizers, typer.Option("--optimizer", help="Of local steps.")] = Optimizers.sgd,
    labels: Annotated[int | None, typer.Option("--labels", help="Classes, for a classifier.")] = None,
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="Gradient checkpointing, for all.")] = False,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="SSF's layers recompute outputs instead of keeping them.")
    ] = False,
) -> None:
    """What training will cost in bytes, memory and disk, method by method: of a spec, or (options below) of a model."""
    from fedspan.core import registry
    from fedspan.core.spec import Spec
    from fedspan.costs.model import ModelRequest
    from fedspan.costs.plan import plan as planned

    for path in plugin or []:
        registry.load_file(path)
    if (spec is None) == (model is None):
        raise FedspanError("give a spec, as in `fedspan plan SPEC`, or a model, as in `fedspan plan --model DIR`")
    source: Spec | ModelRequest
    if spec is not None:
        source = Spec.load(spec, tuple(changes or ()))
    else:
        assert model is not None
        source = ModelRequest(
            model=model, rank=rank, trained=trained, lora_rank=lora_rank, batch_size=batch_size, length=length,
            dtype=dtype.value, rounds=rounds, clients=clients, clients_per_round=clients_per_round,
            frozen_modules=tuple(freeze or ()), optimizer=optimizer.value, labels=labels, checkpointing=checkpointing,
            recompute=recompute,
        )  # fmt: skip
    with console.status("a round of each method, without numbers"):
        found = planned(source, methods.split(",") if methods else None)
    printing.plan(found, console)


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

    from fedspan.api import spec as experiment

    torch.set_num_threads(threads)
    printing.diagnosis(experiment.examine(experiment.Spec.load(spec, tuple(changes or ())), target), console)


@app.command()
def version() -> None:
    """The versions that a run's numbers depend on."""
    from fedspan.engine.run_dir import versions

    console.print("  ".join(f"{name} {number}" for name, number in versions().items()), highlight=False)


def main() -> None:
    """Run the command line; a user's mistake is one line, never a traceback."""
    try:
        app()
    except FedspanError as error:
        Console(stderr=True).print("[bold red]error[/]:", escape(str(error)), highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
