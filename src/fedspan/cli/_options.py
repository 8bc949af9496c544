"""Options that several commands share, what makes options of a function's parameters, and the spec they lead to."""

from __future__ import annotations

import copy
import inspect
import re
import shlex
import sys
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from fedspan.core.spec import Spec


def key_and_value(changes: list[str] | None) -> list[str]:
    """Return the values of --set; refuse one without a key or a value."""
    for change in changes or ():
        if not change.partition("=")[0] or "=" not in change:
            raise typer.BadParameter(f"write key=value, as in method.lr=0.1, not {change!r}")
    return changes or []


Count = Annotated[int, typer.Option(min=1)]
CountOrNone = Annotated[int | None, typer.Option(min=1)]
SpecFile = Annotated[Path, typer.Argument(metavar="SPEC", help="The spec, a TOML file.")]
Out = Annotated[Path, typer.Option(help="Directory for the results.")]
Grids = Annotated[list[str] | None, typer.Option("--grid", metavar="KEY=VALUES")]
Formats = Annotated[str, typer.Option("--format", help="What to write: html, md, csv, png.")]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        callback=key_and_value,
        help="Change a key of the spec, as in method.lr=0.1.",
    ),
]
Threads = Annotated[
    int,
    typer.Option(min=1, help="Threads of torch. Small problems are fastest with 1."),
]
Jobs = Annotated[int, typer.Option(min=1, help="Number of processes.")]
Plugin = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin",
        metavar="FILE",
        help="A Python file that registers a method, metric or other choice of yours.",
    ),
]


def described(command: Callable[..., Any]) -> str:
    """Make options of a command's parameters, with the entries of its docstring's `Args:` as their help texts.

    Returns:
        The help text of the command: its docstring up to `Args:`.
    """
    text = inspect.getdoc(command) or ""
    words, hints = entries(text), typing.get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        hint, info = hints[name], typer.Option("--" + name.replace("_", "-"))
        if typing.get_origin(hint) is Annotated:
            hint, info = hint.__origin__, copy.copy(hint.__metadata__[0])
        elif parameter.default is parameter.empty:
            info = typer.Argument()
        info.help = info.help or words.get(name)
        command.__annotations__[name] = Annotated[hint, info]
    return text.partition("\n\nArgs:")[0]


def entries(docstring: str) -> dict[str, str]:
    """Return the entries of a docstring's `Args:`; one entry may be of several names."""
    section = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)+)", inspect.cleandoc(docstring), re.M)
    found: dict[str, str] = {}
    for names, text in re.findall(
        r"^    (\w[\w, ]*): (.*(?:\n {5,}.*)*)", section[1] if section else "", re.M
    ):
        found |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return found


def load_spec(
    path: Path,
    changes: Sequence[str] | None,
    threads: int | None = None,
    plugins: Sequence[Path] | None = None,
) -> Spec:
    """Return the spec of a file with changes, after plugins are imported and torch is given its threads."""
    load_plugins(plugins)
    from fedspan.core.errors import at_most
    from fedspan.core.spec import Spec

    if threads is not None:
        import torch

        at_most("--threads", threads, 1024)
        torch.set_num_threads(threads)
    return Spec.load(path, tuple(changes or ()))


def load_plugins(paths: Sequence[Path] | None) -> None:
    """Import the user's own files."""
    for path in paths or ():
        from fedspan.core.plugins import load_plugin

        load_plugin(path)


def command_line() -> str:
    """Return the command as the user wrote it."""
    return shlex.join(["fedspan", *sys.argv[1:]])
