"""The console of the command line, and what is printed to it."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

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

    The first `left` columns (by default all) are aligned left, the others right. These continue in a further table,
    with the first column, if the console is too narrow.
    """
    if rows:
        for part in _parts(heads, rows, left):
            cells = [[row[place] for place in part] for row in (heads, *rows)]
            own = None if left is None else sum(place < left for place in part)
            made = terminal.table(cells[0], cells[1:], width=console.width, left=own, title=title)
            console.print(made)
        if note:
            say(f"{note}\n", style="dim")


def _parts(
    heads: Sequence[str], rows: Sequence[Sequence[str]], left: int | None
) -> list[list[int]]:
    """Return the columns of each table, so that no word is broken."""
    least = [
        max(
            (len(word) for one in column for word in Text.from_markup(one).plain.split()), default=0
        )
        for column in zip(heads, *rows, strict=True)
    ]
    parts: list[list[int]] = [[]]
    for place in range(len(heads)):
        width = sum(least[one] + 1 for one in (*parts[-1], place))
        if left is not None and place >= left and width > console.width:
            parts.append([0])
        parts[-1].append(place)
    return parts


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
