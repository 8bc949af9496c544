"""`fedspan list`: what a spec can name."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fedspan.cli._options import Plugin, load_plugins

AXES = ("space", "drift", "local", "uplink", "server", "downlink")
TABLES = {
    "spec.py": ("Spec",),
    "config.py": ("Training", "Participation", "Projection", "Engine", "Search"),
    "privacy.py": ("Privacy",),
}


def command(
    name: Annotated[
        str | None, typer.Argument(help="One of the names, to see its settings.")
    ] = None,
    plugin: Plugin = None,
) -> None:
    """List what a spec can name, or the settings of one NAME."""
    load_plugins(plugin)
    if name is None:
        _all(bool(plugin))
    else:
        _one(name, bool(plugin))


def _kinds(plugins: bool) -> dict[str, dict[str, str]]:
    """Kind → name → one-line description. Torch is imported for the choices of plugins alone."""
    from fedspan.cli.app import commands
    from fedspan.core.catalog import FOLDERS, class_summaries, summaries

    found = {kind: summaries(kind) for kind in FOLDERS}
    if plugins:
        from fedspan.core import registry

        found = {
            kind: {n: registry.summary(c) for n, c in registry.choices(kind).items()}
            for kind in FOLDERS
        }
    tables = [
        item for file, names in TABLES.items() for item in class_summaries(file, names).items()
    ]
    found["table"] = {name.lower(): text for name, text in tables}
    return found | {
        "command": {n: str(m.command.__doc__).splitlines()[0] for n, m in commands().items()}
    }


def _entry(kind: str, name: str) -> Any:
    """The class of a name, or the module of a command."""
    from fedspan.cli.app import commands
    from fedspan.core import config, registry, spec

    if kind == "command":
        return commands()[name]
    if kind == "table":
        return spec.Spec if name == "spec" else getattr(config, name.capitalize())
    return registry.choices(kind)[name]


def _all(plugins: bool) -> None:
    from rich.markup import escape

    from fedspan.cli._tables import console, say, table

    for kind, entries in _kinds(plugins).items():
        rows = [(f"[bold]{name}", escape(text)) for name, text in entries.items()]
        console.print(table(("name", "description"), rows, title=f"{kind}s"), "")
    say("The settings of one: fedspan list NAME")


def _one(name: str, plugins: bool) -> None:
    from rich.markup import escape

    from fedspan.cli._tables import console, say, table
    from fedspan.core.errors import SpecError, did_you_mean

    known = _kinds(plugins)
    found = {kind: entries[name] for kind, entries in known.items() if name in entries}
    if not found:
        near = did_you_mean(name, [one for entries in known.values() for one in entries])
        raise SpecError(f"there is no {name!r}{near}; `fedspan list` shows every name")
    from fedspan.cli._fields import settings  # imports torch

    for kind, text in found.items():
        doubled = text.lower().startswith(f"{name}: ")  # as in "FedAvg: federated averaging"
        say(f"{kind} {name}: {text[len(name) + 2 :] if doubled else text}")
        if kind == "command":
            say(f"  its options: fedspan {name} --help")
        rows = {row[0]: row for row in settings(_entry(kind, name))}
        axes = [rows.pop(axis) for axis in AXES if kind == "method" and axis in rows]
        chosen = [(axis, _choices(of), *rest) for axis, of, *rest in axes]
        for head, type_, lines in (("axis", "choices", chosen), ("setting", "type", rows.values())):
            if lines:
                cells = [[escape(cell) for cell in row] for row in lines]
                console.print(table((head, type_, "default", "description"), cells))


def _choices(kind: str) -> str:
    """The names of a kind; a compressor stands for a choice of some."""
    from fedspan.core import registry

    more = ["a compressor"] if hasattr(registry.KINDS[kind], "adopts") else []
    return " | ".join([*registry.choices(kind), *more])
