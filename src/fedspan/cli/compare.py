"""`fedspan compare`: methods side by side."""

from typing import Literal

from fedspan.cli._options import (
    Changes,
    CountOrNone,
    Formats,
    Grids,
    Jobs,
    Out,
    Plugin,
    SpecFile,
    command_line,
    load_plugins,
)


def command(
    spec: SpecFile,
    out: Out,
    methods: list[str] | None = None,
    grid: Grids = None,
    budget: list[str] | None = None,
    changes: Changes = None,
    seeds: CountOrNone = None,
    tune_seeds: CountOrNone = None,
    tune_rounds: CountOrNone = None,
    tail: CountOrNone = None,
    metric: str | None = None,
    goal: Literal["max", "min"] | None = None,
    jobs: Jobs = 1,
    resume: bool = False,
    formats: Formats = "html,md,csv",
    plugin: Plugin = None,
) -> None:
    """Tune methods, run them on one task and compare them.

    SPEC is a spec, or a comparison file.

    Args:
        methods: Methods to compare: fedavg,ssf:rank=0.05,control=paper as SSF small
        grid: Values to tune over: lr=0.01,0.1 or ssf:lr=0.1,1.0
        budget: Compare at this cost: up=10MB, total=50MB or rounds=200
        seeds: Number of seeds. Default: 3.
        tune_seeds: Number of seeds in tuning. Default: 1.
        tune_rounds: Rounds per run in tuning. Default: as in the final runs.
        tail: The result is the mean of the last evaluations. Default: 1.
        metric: Compare by this metric. Default: the main one.
        goal: Whether a higher or a lower metric is better.
        resume: Continue the comparison in --out.
    """
    from fedspan.cli._tables import console
    from fedspan.study.conduct import conduct
    from fedspan.study.request import requested

    load_plugins(plugin)
    study = requested(
        spec, methods=methods or (), grids=grid or (), budget=budget or (), changes=changes or (), metric=metric,
        goal=goal, seeds=seeds, tune_seeds=tune_seeds, tune_rounds=tune_rounds, tail=tail,
    )  # fmt: skip
    conduct(
        study, out, jobs=jobs, resume=resume, formats=formats.split(","), line=command_line(), console=console,
        plugins=tuple(plugin or ()),
    )  # fmt: skip
