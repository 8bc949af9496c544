"""`fedspan report`: runs on one page."""

import signal
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from fedspan.cli._options import Formats, Plugin, command_line, load_plugins


def command(
    run_dirs: list[Path],
    out: Path | None = None,
    formats: Formats = "html",
    metric: str | None = None,
    live: bool = False,
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
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
        live: Serve the page and follow the runs; write nothing.
        port: Port of --live. 0: any free port.
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
    if live:
        if out is not None:
            raise typer.BadParameter(
                "--live writes nothing; leave --out out, or run without --live"
            )
        from fedspan.study.live import Server

        # a shell's background jobs begin with Ctrl-C ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)
        where = ", ".join(map(str, run_dirs))
        server = Server(run_dirs, metric, command_line(), port)
        with server, suppress(KeyboardInterrupt):  # Ctrl-C is its usual end
            typer.echo(f"http://127.0.0.1:{server.server_port}/ follows {where}; Ctrl-C ends it")
            server.serve_forever(poll_interval=0.2)
        return 0
    report.check_places(run_dirs)
    if out is None and (len(run_dirs) > 1 or not run_dirs[0].is_dir()):
        raise typer.BadParameter("give --out, the directory for the results")
    made = report.report(run_dirs, out or run_dirs[0], formats.split(","), metric, command_line())
    for path in made:
        typer.echo(path)
    return 0
