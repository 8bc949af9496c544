"""`fedspan data`: data sets and models by name, and how to get them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fedspan.data.sets import DataSet


def command(
    action: Annotated[str | None, typer.Argument(metavar="[get]")] = None,
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...")] = None,
) -> None:
    """List data sets and models by name, or get some of them.

    `fedspan data get mnist` downloads, checks and converts the official files. They are kept in FEDSPAN_DATA, by
    default `fedspan` in the cache directory of the platform.

    Args:
        action: get: bring data sets to this machine.
        names: The data sets.
    """
    from fedspan.cli._tables import say, size
    from fedspan.core.errors import one_of
    from fedspan.data import sets, store

    if action is None:
        for name in sets.names():
            found = sets.find(name)
            state = "here" if found.here() else f"not here; {found.command}"
            say(f"{name} ({size(found.size)}, {state})" if found.size else f"{name} ({state})")
            say(f"    {found.about}\n    clients: {found.clients}")
            say(f"    licence: {found.licence}\n    source: {found.source}")
        say(f"\nThe data directory: {store.folder()} (set FEDSPAN_DATA to choose another)")
        return
    if action in sets.names():
        raise typer.BadParameter(f"write `fedspan data get {' '.join([action, *(names or ())])}`")
    one_of("action", action, ("get",))
    if not names:
        raise typer.BadParameter(f"name what to get: {', '.join(sets.names())}")
    for found in [sets.find(name) for name in dict.fromkeys(names)]:
        _get(sets.find(found.part_of or found.name))


def _get(found: DataSet) -> None:
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress

    from fedspan.cli._tables import say
    from fedspan.data import sets

    if found.places() or (found.package and found.here()):
        say(f"{found.name} is here")
        return
    columns = *Progress.get_default_columns(), DownloadColumn()
    progress, bars = Progress(*columns, console=Console(stderr=True)), {}

    def seen(name: str, done: int, total: int) -> None:
        progress.start()
        if name not in bars:
            bars[name] = progress.add_task(name, total=total or None)
        progress.update(bars[name], completed=done)

    try:
        sets.get(found, seen)
    finally:
        if bars:
            progress.stop()
    say(f"{found.name} is here: {', '.join(map(str, found.places().values()))}")
