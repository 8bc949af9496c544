"""Options that several commands share, and the spec they lead to."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fedspan.core.spec import Spec


def _key_and_value(changes: list[str] | None) -> list[str]:
    for change in changes or ():
        if not change.partition("=")[0] or "=" not in change:
            raise typer.BadParameter(f"write key=value, as in method.lr=0.1, not {change!r}")
    return changes or []


SpecFile = Annotated[Path, typer.Argument(metavar="SPEC", help="The spec, a TOML file.")]
Out = Annotated[Path, typer.Option("--out", help="Directory for the results.")]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        callback=_key_and_value,
        help="Change a key of the spec, as in method.lr=0.1.",
    ),
]
Threads = Annotated[
    int,
    typer.Option("--threads", min=1, help="Threads of torch. Small problems are fastest with 1."),
]
Jobs = Annotated[int, typer.Option("--jobs", min=1, help="Number of processes.")]
Plugin = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin",
        metavar="FILE",
        help="A Python file that registers a method, metric or other choice of yours.",
    ),
]


def load_spec(path: Path, changes: Sequence[str] | None, threads: int | None = None) -> Spec:
    """The spec of a file with changes, after torch is given its threads."""
    from fedspan.core.errors import at_most
    from fedspan.core.spec import Spec

    if threads is not None:
        import torch

        at_most("--threads", threads, 1024)
        torch.set_num_threads(threads)
    return Spec.load(path, tuple(changes or ()))


def load_plugins(paths: Sequence[Path] | None) -> None:
    """Imports the user's own files."""
    if paths:
        from fedspan.core.plugins import load_plugin

        for path in paths:
            load_plugin(path)


def command_line() -> str:
    """The command as the user wrote it."""
    return shlex.join(["fedspan", *sys.argv[1:]])
