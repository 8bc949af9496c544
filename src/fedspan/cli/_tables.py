"""The console of the command line, and what is printed to it."""

from collections.abc import Sequence

from rich.console import Console

from fedspan.core import terminal

console = Console()


def show(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: int | None = None,
    title: str | None = None,
    note: str = "",
) -> None:
    """Print a table, if it has rows, and a note on it.

    The first `left` columns (by default all) are aligned left, the others right.
    """
    if rows:
        console.print(terminal.table(heads, rows, width=console.width, left=left, title=title))
        if note:
            say(f"{note}\n", style="dim")


def say(text: str, *, style: str | None = None) -> None:
    """Print lines."""
    text, whole = terminal.plain(text), not console.is_terminal
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=whole)


def size(value: float) -> str:
    """Return bytes with a unit, in three digits."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} PB"
