"""`fedspan list`: what a spec can name."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fedspan.cli._options import Plugin, load_plugins


def command(
    name: Annotated[str | None, typer.Argument(help="One of the names, to see its settings.")] = None,
    plugin: Plugin = None,
) -> None:
    """List methods, projectors, tasks and all else that a spec can name, or the settings of one of them."""
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
        console.print(table(("name", "description"), rows, left=2, title=f"{kind}s"), "")
    say("The settings of one: fedspan list NAME")


def _one(name: str) -> None:
    from rich.markup import escape

    from fedspan.cli._fields import settings
    from fedspan.cli._tables import console, say, table
    from fedspan.core.errors import one_of

    kinds = _kinds()
    one_of("NAME", name, {name for entries in kinds.values() for name in entries})
    for kind, entries in kinds.items():
        if name not in entries:
            continue
        say(f"{kind} {name}: {_summary(kind, entries[name])}")
        if kind == "command":
            say(f"Its options: fedspan {name} --help")
            continue
        rows = [[escape(cell) for cell in row] for row in settings(entries[name])]
        if rows:
            console.print(table(("setting", "type", "default", "description"), rows, left=4))
