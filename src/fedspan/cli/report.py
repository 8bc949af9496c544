"""`fedspan report`: runs on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedspan.cli._options import Out, command_line


def command(
    run_dirs: Annotated[list[Path], typer.Argument(help="Run directories, or directories that contain them.")],
    out: Out,
    formats: Annotated[str, typer.Option("--format", help="What to write: html, md, csv, png.")] = "html",
    metric: Annotated[
        str | None, typer.Option("--metric", help="The metric to show first. Default: the main one.")
    ] = None,
) -> None:
    """Show runs on one page, by rounds, bytes and seconds.

    RUN_DIRS are run directories, or directories that contain them.
    """
    from fedspan.study import report

    for path in report.report(run_dirs, out, formats.split(","), metric, command_line()):
        typer.echo(path)
