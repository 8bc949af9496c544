"""The console of the command line, and what is printed to it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from fedspan.core import terminal

console = Console()


def table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: int | None = None,
    title: str | None = None,
) -> Table:
    """A plain table; the first `left` columns (by default all) are aligned left, the others right."""
    return terminal.table(heads, rows, width=console.width, left=left, title=title)


def say(text: str) -> None:
    """Prints lines."""
    terminal.say(text, console)


def size(value: float) -> str:
    """Bytes with a unit, in three digits."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} PB"
