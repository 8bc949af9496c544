"""The progress bar of a comparison or of a proposal: how much is done, and what is being run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

LONG = 44  # characters of what is being run


class Bar:
    """A bar of pieces of work, of which more may come to light while others are done."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self.progress, self.task = progress, task
        self.total = self.completed = 0.0

    def more(self, work: float) -> None:
        """There is more to do."""
        self.total += work
        self.show()

    def done(self, work: float = 1) -> None:
        """Something is done."""
        self.completed += work
        self.show()

    def doing(self, what: str) -> None:
        """What is being run."""
        text = what if len(what) <= LONG else f"{what[: LONG - 1]}…"
        self.progress.update(self.task, description=text, refresh=True)

    def show(self) -> None:
        """Draws it."""
        self.progress.update(self.task, completed=self.completed, total=self.total)


@contextmanager
def progress_of(what: str, console: Console) -> Iterator[Bar]:
    """A bar on a console. It ends full, also where work that was counted turned out to be needless."""
    columns = [
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        TextColumn("{task.percentage:.0f} %"),
    ]
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, expand=True
    ) as progress:
        bar = Bar(progress, progress.add_task(what, total=None))
        yield bar
        bar.doing(what)
        bar.total = bar.completed = max(bar.total, 1)
        bar.show()
