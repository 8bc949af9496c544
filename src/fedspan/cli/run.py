"""`fedspan run`: a spec to its result."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fedspan.cli._options import (
    Changes,
    Plugin,
    SpecFile,
    Threads,
    command_line,
    load_plugins,
    load_spec,
)

if TYPE_CHECKING:
    from fedspan.core.spec import Spec
    from fedspan.engine.result import Result

DIVERGED = 1


def command(
    spec: SpecFile,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            "--run-dir", help="Directory for history, checkpoints and model. Default: not saved."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --run-dir.")
    ] = False,
    changes: Changes = None,
    seeds: Annotated[
        int, typer.Option("--seeds", min=1, help="Number of runs, with consecutive seeds.")
    ] = 1,
    callback: Annotated[
        list[str] | None,
        typer.Option(
            "--callback",
            metavar="NAME",
            help="Add a callback, such as tensorboard or early_stopping.",
        ),
    ] = None,
    simulate: Annotated[
        Literal["auto", "loop", "batched", "pool"] | None,
        typer.Option(
            "--simulate",
            help="How the clients of a round are computed; short for --set engine.simulate=…",
        ),
    ] = None,
    plugin: Plugin = None,
    threads: Threads = 1,
) -> int:
    """Run a spec, a TOML file.

    Ctrl-C and SIGTERM stop it cleanly, and --resume continues it. The exit code is 1 where the run diverged.
    """
    load_plugins(plugin)
    short = [f"engine.simulate={simulate}"] if simulate else []
    loaded = _with_callbacks(load_spec(spec, [*(changes or ()), *short], threads), callback or [])

    from fedspan.api.run import run
    from fedspan.core.errors import Terminated

    try:
        result = run(loaded, run_dir, seeds=seeds, resume=resume, progress=True)
    except (KeyboardInterrupt, Terminated):
        _say_how_to_resume(run_dir)
        raise
    _show(result)
    return DIVERGED if any(status.startswith("diverged") for status in result.statuses) else 0


def _with_callbacks(spec: Spec, names: list[str]) -> Spec:
    from fedspan.core import registry, tables
    from fedspan.core.errors import one_of

    for name in names:
        one_of("--callback", name, registry.choices("callback"))
    more = [tables.build("callback", {"name": name}, "callbacks") for name in names]
    return dataclasses.replace(spec, callbacks=(*spec.callbacks, *more))


def _say_how_to_resume(run_dir: Path | None) -> None:
    from fedspan.engine.provenance import CHECKPOINT, TRIALS

    if run_dir is not None and (run_dir / TRIALS).exists():
        typer.echo(
            f"interrupted in the search for lr; continue it with: {command_line()}", err=True
        )
        return
    saved = run_dir is not None and any(run_dir.rglob(CHECKPOINT))
    line = command_line() + ("" if "--resume" in sys.argv else " --resume")
    typer.echo(
        f"interrupted; continue with: {line}" if saved else "interrupted; nothing was saved",
        err=True,
    )


def _show(result: Result) -> None:
    """The last evaluation of each seed."""
    from fedspan.cli._tables import console, say, size, table
    from fedspan.core.method import DETAILS

    if result.lr_search is not None:
        found = ", ".join(
            f"{name} = {value:.4g}" for name, value in result.lr_search["values"].items()
        )
        cost = result.lr_search.get("cost")
        say(
            f"found: {found}"
            + (f" (search: {cost}, by the {result.lr_search['metric']})" if cost else "")
        )
    metrics = [name for name in result.metrics if name not in DETAILS]
    heads = ("seed", "status", "round", *metrics, "up", "down", "seconds")
    rows = []
    for seed, status, lines in zip(result.seeds, result.statuses, result.runs, strict=True):
        last = lines[-1]
        values = ["-" if last.get(name) is None else f"{last[name]:.4g}" for name in metrics]
        sizes = [size(last[name]) for name in ("up_bytes", "down_bytes")]
        rows.append(
            [str(seed), status, str(last["round"]), *values, *sizes, f"{last['seconds']:.1f}"]
        )
    console.print(table(heads, rows, left=2))
    for line in result.kept():
        say(line)
    say("not saved; give --run-dir to keep the history and the model" if result.run_dir is None
        else f"saved in {result.run_dir}")  # fmt: skip
