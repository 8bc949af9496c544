"""`fedspan list`: what a spec can name."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fedspan.cli._options import Plugin, load_plugins


def command(
    name: Annotated[str | None, typer.Argument(help="One of the names, to see its settings.")] = None,
    plugin: Plugin = None,
) -> None:
    """List what a spec can name, or the settings of one NAME."""
    load_plugins(plugin)
    if name is None:
        _all()
    else:
        _one(name)


def _kinds() -> dict[str, dict[str, Any]]:
    """Kind → name → class, or module for a command."""
    from fedspan.cli.app import commands
    from fedspan.core import config, registry
    from fedspan.core.spec import Spec

    tables = (config.Training, config.Participation, config.Projection, config.Engine, config.Search)
    found: dict[str, dict[str, Any]] = {kind: dict(registry.choices(kind)) for kind in registry.KINDS}
    found["table"] = {"spec": Spec} | {cls.__name__.lower(): cls for cls in tables}
    return found | {"command": dict(commands())}


def _summary(kind: str, entry: Any) -> str:
    from fedspan.core import registry

    if kind == "command":
        return str(entry.command.__doc__).splitlines()[0]
    return str(entry.__doc__).splitlines()[0] if kind == "table" else registry.summary(entry)


def _all() -> None:
    from rich.markup import escape

    from fedspan.cli._tables import console, say, table

    for kind, entries in _kinds().items():
        rows = [(f"[bold]{name}", escape(_summary(kind, entry))) for name, entry in entries.items()]
        console.print(table(("name", "description"), rows, title=f"{kind}s"), "")
    say("The settings of one: fedspan list NAME")


def _one(name: str) -> None:
    from fedspan.cli._fields import settings
    from fedspan.cli._tables import say
    from fedspan.core.errors import SpecError, did_you_mean

    known = _kinds()
    found = {kind: entries[name] for kind, entries in known.items() if name in entries}
    if not found:
        near = did_you_mean(name, [one for entries in known.values() for one in entries])
        raise SpecError(f"there is no {name!r}{near}; `fedspan list` shows every name")
    for kind, entry in found.items():
        say(f"{kind} {name}: {_summary(kind, entry)}")
        if kind == "command":
            say(f"  its options: fedspan {name} --help")
        rows = settings(entry)
        widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
        for row in rows:
            say("  " + "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]))
