"""`fedspan list`: what a spec can name."""

from typing import Annotated

import typer

from fedspan.cli._options import Plugin, load_plugins

AXES = ("space", "drift", "local", "uplink", "server", "downlink")
TABLES = {
    "spec.py": ("Spec",),
    "config.py": ("Training", "Participation", "Projection", "Engine", "Search"),
    "privacy.py": ("Privacy",),
}


def command(
    name: Annotated[str | None, typer.Argument()] = None,
    plugin: Plugin = None,
) -> None:
    """List what a spec can name, or the settings of one NAME.

    Args:
        name: One of the names, to see its settings.
    """
    load_plugins(plugin)
    from rich.markup import escape

    from fedspan.cli._tables import say, show
    from fedspan.cli.app import commands
    from fedspan.core.catalog import FOLDERS, class_summaries, summaries

    kinds = {kind: summaries(kind) for kind in FOLDERS}
    if plugin:  # torch is imported for the choices of plugins alone
        from fedspan.core import registry

        for kind in FOLDERS:
            choices = registry.choices(kind)
            kinds[kind] = {name: registry.summary(cls) for name, cls in choices.items()}
    kinds["table"] = {
        table.lower(): text
        for file, names in TABLES.items()
        for table, text in class_summaries(file, names).items()
    }
    kinds["command"] = {
        one: str(module.command.__doc__).splitlines()[0] for one, module in commands().items()
    }
    if name is not None:
        _show(name, kinds)
        return
    for kind, entries in kinds.items():
        rows = [(f"[bold]{entry}", escape(text)) for entry, text in entries.items()]
        show(("name", "description"), rows, title=f"{kind}s")
        say("")
    say("The settings of one: fedspan list NAME")


def _show(name: str, kinds: dict[str, dict[str, str]]) -> None:
    """Print what has a name, of whatever kind, and its settings."""
    from rich.markup import escape

    from fedspan.cli._tables import say, show
    from fedspan.core.errors import SpecError, did_you_mean

    found = {kind: entries[name] for kind, entries in kinds.items() if name in entries}
    if not found:
        near = did_you_mean(name, [one for entries in kinds.values() for one in entries])
        raise SpecError(f"there is no {name!r}{near}; `fedspan list` shows every name")
    from fedspan.cli._fields import settings  # imports torch
    from fedspan.core import config, registry, spec

    for kind, text in found.items():
        doubled = text.lower().startswith(f"{name}: ")  # as in "FedAvg: federated averaging"
        say(f"{kind} {name}: {text[len(name) + 2 :] if doubled else text}")
        if kind == "command":
            say(f"  its options: fedspan {name} --help")
            continue
        if kind == "table":
            entry = spec.Spec if name == "spec" else getattr(config, name.capitalize())
        else:
            entry = registry.choices(kind)[name]
        rows = {row[0]: [escape(cell) for cell in row] for row in settings(entry)}
        axes = [rows.pop(axis) for axis in AXES if kind == "method" and axis in rows]
        for row in axes:  # a compressor stands for a choice of some kinds
            more = ["a compressor"] if row[1] in registry.ADOPTING else []
            row[1] = " | ".join([*registry.choices(row[1]), *more])
        show(("axis", "choices", "default", "description"), axes)
        show(("setting", "type", "default", "description"), [*rows.values()])
