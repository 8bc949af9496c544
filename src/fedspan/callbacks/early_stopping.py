"""Ends a run whose metric no longer improves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedspan.callbacks._base import Judge
from fedspan.core.errors import at_least, not_negative
from fedspan.core.registry import register
from fedspan.engine.history import Mode

if TYPE_CHECKING:
    from fedspan.engine.loop import Line, Loop, Row


@register
@dataclass(frozen=True)
class EarlyStopping(Judge):
    """Ends a run after `patience` evaluations without a better value.

    Args:
        metric: The metric to follow; by default the main one, of the validation set where there is one.
        patience: Evaluations without an improvement after which the run ends.
        min_delta: How much better a value must be to count as an improvement.
        mode: "max" if more of the metric is better, "min" if less is; by default as the metric says.
    """

    decides: ClassVar[bool] = True
    metric: str | None = None
    patience: int = 10
    min_delta: float = 0.0
    mode: Mode | None = None

    def __post_init__(self) -> None:
        at_least("patience", self.patience, 1)
        not_negative("min_delta", self.min_delta)
        super().__post_init__()

    def on_evaluate(self, run: Loop, row: Row) -> None:
        """Ends the run when no seed has improved for `patience` evaluations."""
        metric, sign = self.judged_by(run)
        waited = [
            self._waited(lines, metric, sign)
            for lines in run.lines
            if not lines[-1].get("diverged")
        ]
        if min(waited, default=0) >= self.patience:
            run.end(f"no better {metric} in {self.patience} evaluations")

    def _waited(self, lines: list[Line], metric: str, sign: int) -> int:
        """Evaluations since the best one; counted on the history, so that a resumed run counts on."""
        best, waited = -float("inf"), 0
        for line in lines:
            value = line.get(metric)
            if value is not None and sign * value > best + self.min_delta:
                best, waited = sign * value, 0
            else:
                waited += 1
        return waited
