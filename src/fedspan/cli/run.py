"""`fedspan run`: a spec to its result."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedspan.cli._options import (
    Changes,
    Count,
    Plugin,
    SpecFile,
    Threads,
    command_line,
    load_spec,
)

if TYPE_CHECKING:
    from fedspan.engine.result import Result

DIVERGED = 1


def command(
    spec: SpecFile,
    run_dir: Path | None = None,
    resume: bool = False,
    changes: Changes = None,
    seeds: Count = 1,
    callback: Annotated[list[str] | None, typer.Option(metavar="NAME")] = None,
    plugin: Plugin = None,
    threads: Threads = 1,
) -> int:
    """Run a spec, a TOML file.

    Ctrl-C and SIGTERM stop it cleanly, and --resume continues it. The exit code is 1 where the run diverged.

    Args:
        run_dir: Directory for history, checkpoints and model. Default: not saved.
        resume: Continue the run in --run-dir.
        seeds: Number of runs, with consecutive seeds.
        callback: Add a callback, such as tensorboard or early_stopping.
    """
    loaded = load_spec(spec, changes, threads, plugin)

    from fedspan.api.run import run
    from fedspan.core import registry, tables
    from fedspan.core.errors import Terminated, one_of

    for name in callback or ():
        one_of("--callback", name, registry.choices("callback"))
    more = [tables.build("callback", {"name": name}, "callbacks") for name in callback or ()]
    loaded = dataclasses.replace(loaded, callbacks=(*loaded.callbacks, *more))
    try:
        result = run(loaded, run_dir, seeds=seeds, resume=resume, progress=True)
    except (KeyboardInterrupt, Terminated):
        _say_how_to_resume(run_dir)
        raise
    _show(result)
    return DIVERGED if any(status.startswith("diverged") for status in result.statuses) else 0


def _say_how_to_resume(run_dir: Path | None) -> None:
    from fedspan.engine.provenance import CHECKPOINT, TRIALS

    line, text = command_line(), "interrupted; nothing was saved"
    if run_dir is not None and (run_dir / TRIALS).exists():
        text = f"interrupted in the search for lr; continue it with: {line}"
    elif run_dir is not None and any(run_dir.rglob(CHECKPOINT)):
        more = "" if "--resume" in sys.argv else " --resume"
        text = f"interrupted; continue with: {line}{more}"
    typer.echo(text, err=True)


def _show(result: Result) -> None:
    """Print the last evaluation of each seed."""
    from fedspan.cli._tables import say, show, size
    from fedspan.core.method import DETAILS

    if (search := result.lr_search) is not None:
        found = ", ".join(f"{name} = {value:.4g}" for name, value in search["values"].items())
        cost = search.get("cost")
        say(f"found: {found}" + (f" (search: {cost}, by the {search['metric']})" if cost else ""))
    metrics = [name for name in result.metrics if name not in DETAILS]
    rows = []
    for seed, status, lines in zip(result.seeds, result.statuses, result.runs, strict=True):
        last = lines[-1]
        row = [str(seed), status, str(last["round"])]
        row += ["-" if last.get(name) is None else f"{last[name]:.4g}" for name in metrics]
        row += [size(last["up_bytes"]), size(last["down_bytes"]), f"{last['seconds']:.1f}"]
        rows.append(row)
    show(("seed", "status", "round", *metrics, "up", "down", "seconds"), rows, left=2)
    for line in result.kept():
        say(line)
    where = "not saved; give --run-dir to keep the history and the model"
    say(where if result.run_dir is None else f"saved in {result.run_dir}")
