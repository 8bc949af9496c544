"""`fedspan report`: runs on one page."""

from pathlib import Path

import typer

from fedspan.cli._options import Formats, Plugin, command_line, load_plugins


def command(
    run_dirs: list[Path],
    out: Path | None = None,
    formats: Formats = "html",
    metric: str | None = None,
    verify: bool = False,
    verify_run: str | None = None,
    plugin: Plugin = None,
) -> int:
    """Show runs on one page, by rounds, bytes and seconds.

    With --verify the exit code is 1 if a value differs.

    Args:
        run_dirs: Run directories, or directories that contain them.
        out: Directory for the results. Default: RUN_DIRS, if it is one directory.
        metric: The metric to show first. Default: the main one.
        verify: Make one run again, drawn at random, and compare it with its record.
        verify_run: The same with the run of this name.
    """
    load_plugins(plugin)
    from fedspan.study import report

    if verify or verify_run is not None:
        from fedspan.cli._tables import say
        from fedspan.study.verify import verify as made_again

        report.check_places(run_dirs)
        if len(run_dirs) > 1:
            raise typer.BadParameter("--verify takes one directory")
        text, same = made_again(run_dirs[0], verify_run)
        say(text)
        return 0 if same else 1
    report.check_places(run_dirs)
    if out is None and (len(run_dirs) > 1 or not run_dirs[0].is_dir()):
        raise typer.BadParameter("give --out, the directory for the results")
    made = report.report(run_dirs, out or run_dirs[0], formats.split(","), metric, command_line())
    for path in made:
        typer.echo(path)
    return 0
