"""Text on the terminal: lines and tables break between words; a pipe or a file gets every line in one piece."""

from __future__ import annotations

import logging
import shutil
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


log = logging.getLogger("fedspan")


def report(text: str, console: Console | None = None) -> None:
    """Logs what a run reports where the logger `fedspan` has a handler; else prints it, if its level allows."""
    if log.handlers:
        log.info("%s", text)
    elif log.level <= logging.INFO and not log.disabled:
        say(text, console)


def say(text: str, console: Console | None = None) -> None:
    """Prints lines to a console, by default stderr."""
    from rich.console import Console

    console = console or Console(stderr=True)
    console.print(plain(text), highlight=False, markup=False, soft_wrap=not console.is_terminal)


def plain(text: str) -> str:
    """A text with the minus that every terminal has; on Windows a file or a pipe has no other."""
    return text.replace("−", "-")


def broken(text: str, stream: TextIO) -> str:
    """A text as a stream takes it, without rich, which takes longer to load than a mistake takes to be found."""
    if not stream.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(
        textwrap.fill(line, width, break_long_words=False) for line in text.splitlines()
    )


def table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    width: int,
    left: int | None = None,
    title: str | None = None,
) -> Table:
    """Makes a plain table that is as wide as the console.

    Args:
        heads: The headings.
        rows: The cells, which may hold rich's markup.
        width: The columns of characters that there are.
        left: How many columns are aligned left, the others right; by default all.
        title: A line above the table.

    Returns:
        What `Console.print` takes.
    """
    from rich.table import Table
    from rich.text import Text

    made = Table(
        title=title, title_justify="left", box=None, header_style="dim", padding=(0, 1, 0, 0)
    )
    cells = [
        [Text.from_markup(cell) for cell in column] for column in zip(heads, *rows, strict=True)
    ]
    widths = [max(map(len, column)) for column in cells]
    least = [max([1, *(len(w) for one in c for w in one.plain.split())]) for c in cells]
    # those that can spare most give way first, and none below its longest word
    while sum(widths) + len(widths) > width and widths != least:
        spare = [size - few for size, few in zip(widths, least, strict=True)]
        widths[spare.index(max(spare))] -= 1
    for number, (head, size) in enumerate(zip(heads, widths, strict=True)):
        justify = "left" if left is None or number < left else "right"
        made.add_column(head, justify=justify, overflow="fold", width=size)  # type: ignore[arg-type]
    for row in rows:
        made.add_row(*row)
    return made
