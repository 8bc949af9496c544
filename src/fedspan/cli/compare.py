"""`fedspan compare`: methods side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from fedspan.cli._options import Changes, Jobs, Out, Plugin, command_line, load_plugins


def command(
    specs: Annotated[
        list[Path],
        typer.Argument(
            help="Specs of several methods on one task, one spec with --methods, or one comparison file."
        ),
    ],
    out: Out,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--methods", help="Methods to compare: fedavg,ssf:rank=0.05,control=paper as SSF small"
        ),
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option("--grid", help="Values to tune over: lr=0.01,0.1 or ssf:lr=0.1,1.0"),
    ] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option("--budget", help="Compare at this cost: up=10MB, total=50MB or rounds=200"),
    ] = None,
    changes: Changes = None,
    seeds: Annotated[
        int | None, typer.Option("--seeds", min=1, help="Number of seeds. Default: 3.")
    ] = None,
    tune_seeds: Annotated[
        int | None,
        typer.Option("--tune-seeds", min=1, help="Number of seeds in tuning. Default: 1."),
    ] = None,
    tune_rounds: Annotated[
        int | None,
        typer.Option(
            "--tune-rounds", min=1, help="Rounds per run in tuning. Default: as in the final runs."
        ),
    ] = None,
    tail: Annotated[
        int | None,
        typer.Option(
            "--tail", min=1, help="The result is the mean of the last evaluations. Default: 1."
        ),
    ] = None,
    metric: Annotated[
        str | None, typer.Option("--metric", help="Compare by this metric. Default: the main one.")
    ] = None,
    goal: Annotated[
        Literal["max", "min"] | None,
        typer.Option("--goal", help="Whether a higher or a lower metric is better."),
    ] = None,
    jobs: Jobs = 1,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the comparison in --out.")
    ] = False,
    formats: Annotated[
        str, typer.Option("--format", help="What to write: html, md, csv, png.")
    ] = "html,md,csv",
    plugin: Plugin = None,
) -> None:
    """Tune methods, run them on one task and compare them.

    SPECS are specs of several methods on one task, one spec with --methods, or one comparison file.
    """
    from fedspan.cli._tables import console
    from fedspan.study.conduct import conduct
    from fedspan.study.request import requested

    load_plugins(plugin)
    study = requested(
        specs, methods=methods or (), grids=grid or (), budget=budget or (), changes=changes or (), metric=metric,
        goal=goal, seeds=seeds, tune_seeds=tune_seeds, tune_rounds=tune_rounds, tail=tail,
    )  # fmt: skip
    conduct(
        study, out, jobs=jobs, resume=resume, formats=formats.split(","), line=command_line(), console=console,
        plugins=tuple(plugin or ()),
    )  # fmt: skip
