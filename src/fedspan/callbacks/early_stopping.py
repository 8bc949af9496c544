"""Ends a run whose metric no longer improves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedspan.core.callback import Callback
from fedspan.core.errors import at_least, not_negative
from fedspan.core.registry import register
from fedspan.engine.judging import higher_is_better, judged_by

if TYPE_CHECKING:
    from fedspan.engine.loop import Line, Loop, Row


@register
@dataclass(frozen=True)
class EarlyStopping(Callback):
    """Ends a run after `patience` evaluations without a better value.

    Args:
        metric: The metric to follow; by default the main one, of the validation set where there is one.
        patience: Evaluations without an improvement after which the run ends.
        min_delta: How much better a value must be to count as an improvement.
    """

    decides: ClassVar[bool] = True
    metric: str | None = None
    patience: int = 10
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        at_least("patience", self.patience, 1)
        not_negative("min_delta", self.min_delta)

    def on_evaluate(self, run: Loop, row: Row) -> None:
        """Ends the run when no seed has improved for `patience` evaluations."""
        waited = [self._waited(lines) for lines in run.lines if not lines[-1].get("diverged")]
        if min(waited, default=0) >= self.patience:
            run.end(f"no better {judged_by(run.lines[0], self.metric)} in {self.patience} evaluations")

    def _waited(self, lines: list[Line]) -> int:
        """Evaluations since the best one; counted on the history, so that a resumed run counts on."""
        metric = judged_by(lines, self.metric)
        sign = 1 if higher_is_better(metric) else -1
        best, waited = -float("inf"), 0
        for line in lines:
            value = line.get(metric)
            if value is not None and sign * value > best + self.min_delta:
                best, waited = sign * value, 0
            else:
                waited += 1
        return waited
