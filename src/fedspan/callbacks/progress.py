"""Print a run's settings and one line per evaluation, with a progress bar on a terminal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from fedspan.core import registry
from fedspan.core.callback import Callback
from fedspan.core.method import DETAILS
from fedspan.core.registry import register
from fedspan.core.terminal import report
from fedspan.data.schema import lines_of
from fedspan.methods.box import projected_values

if TYPE_CHECKING:
    from fedspan.engine.loop import Loop, Row


@register
@dataclass(frozen=True)
class Progress(Callback):
    """Show what is run and how far it is. All of it is printed to stderr, or logged where the logger
    `fedspan` has a handler.

    Args:
        rounds: The length of the run; None shows no bar.
        lines: Whether every evaluation is printed.
        lr_rule: How the step size was found, such as "search"; it is printed next to it.
    """

    rounds: int | None = None
    lines: bool = True
    lr_rule: str | None = None
    _bars: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)

    def on_run_start(self, run: Loop) -> None:
        """Print the settings, and open the bar."""
        method, console = run.method, Console(stderr=True)
        name = registry.name_of(method) if registry.is_registered(method) else type(method).__name__
        weights = "equal weights" if run.problem.weights is None else "weights by examples"
        lr = f"{method.lr:.3g}" if isinstance(method.lr, float | int) else str(method.lr)
        found = "" if self.lr_rule is None else f" ({self.lr_rule})"
        clients = f"{run.clients_per_round} of {run.problem.clients} clients per round"
        own = run.problem.steps
        steps = method.local_steps if own is None else f"{own.min()} to {own.max()}"
        line = f"{name}: {clients}, {weights}, {steps} local steps, lr {lr}{found}"
        if (sizes := projected_values(method, run.problem.layout)) is not None:
            projected, sent, parameters = sizes
            line += f"\n{projected:,} of {parameters:,} parameters are projected, {sent:,} values are sent up"
            if not projected:
                line += (
                    f": {name} has nothing to gain here, because biases, tensors of fewer than `min_numel` parameters "
                    "and the output head are sent in full; `project_modules` of `projection` names others"
                )
        report(line, console)
        for line in lines_of(run.problem.usage):
            report(line, console)
        self._bars.clear()
        if console.is_terminal and self.rounds is not None:
            columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
            bars = Bars("rounds", *columns, console=console, transient=True)
            bars.add_task("", total=self.rounds, completed=run.t)
            bars.start()
            self._bars.append(bars)

    def on_round_end(self, run: Loop) -> None:
        """Move the bar."""
        for bars in self._bars:
            bars.update(bars.task_ids[0], completed=run.t)

    def on_evaluate(self, run: Loop, row: Row) -> None:
        """Print the metrics."""
        if not self.lines:
            return
        console = self._bars[0].console if self._bars else None
        if row.round == 0 and "training_loss" in row.metrics:
            report(
                "no `test` or `validation` is given: only the loss on a sample of the training data is reported",
                console,
            )
        values = "  ".join(
            f"{name} {each.mean():.4g}" for name, each in row.metrics.items() if name not in DETAILS
        )
        hours = "" if row.hours is None else f"  {row.hours:.3g} h"
        of_all = "" if self.rounds is None else f"/{self.rounds}"
        up, down = row.up_bytes.mean() / 1e6, row.down_bytes.mean() / 1e6
        line = f"round {row.round}{of_all}  {values}  {up:.3g} MB up  {down:.3g} MB down{hours}"
        report(line, console)

    def on_run_end(self, run: Loop, result: object = None) -> None:
        """Close the bar."""
        for bars in self._bars:
            bars.stop()

    on_run_error = on_run_end
