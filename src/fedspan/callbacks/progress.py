"""A progress bar, and one line per evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from fedspan.core.callback import Callback
from fedspan.core.registry import register

if TYPE_CHECKING:
    from fedspan.engine.loop import Loop, Row
    from fedspan.engine.result import Result


@register
@dataclass(frozen=True)
class Progress(Callback):
    """Shows a progress bar and prints the metrics of every evaluation.

    Args:
        rounds: The length of the run; None shows no bar.
        lines: Whether every evaluation is printed.
    """

    rounds: int | None = None
    lines: bool = True
    _bars: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)

    def on_run_start(self, run: Loop) -> None:
        """Opens the bar."""
        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
        bars = Bars(*columns, console=Console(stderr=True), transient=True)
        bars.add_task("rounds", total=self.rounds, completed=run.t)
        bars.start()
        self._bars[:] = [bars]

    def on_round_end(self, run: Loop) -> None:
        """Moves the bar."""
        self._bars[0].update(self._bars[0].task_ids[0], completed=run.t)

    def on_evaluate(self, run: Loop, row: Row) -> None:
        """Prints the metrics."""
        if self.lines:
            values = "  ".join(f"{name} {value.mean():.4g}" for name, value in row.metrics.items())
            sizes = f"{row.up_bytes.mean() / 1e6:.3g} MB up  {row.down_bytes.mean() / 1e6:.3g} MB down"
            self._bars[0].console.print(f"round {row.round}  {values}  {sizes}", highlight=False)

    def on_run_end(self, run: Loop, result: Result) -> None:
        """Closes the bar."""
        self._bars[0].stop()
