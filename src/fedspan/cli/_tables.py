"""Tables of the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

console = Console()


def table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, left: int | None = None, title: str | None = None
) -> Table:
    """A plain table; the first `left` columns (by default all) are aligned left, the others right."""
    made = Table(title=title, title_justify="left", box=None, header_style="dim", padding=(0, 1, 0, 0))
    for number, head in enumerate(heads):
        made.add_column(head, justify="left" if left is None or number < left else "right", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def say(text: str) -> None:
    """Prints a line as it is, however long."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def size(value: float) -> str:
    """Bytes with a unit, in three digits."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} PB"
