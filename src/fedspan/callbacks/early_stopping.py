"""End a run whose metric no longer improves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedspan.callbacks._base import judged
from fedspan.core.callback import Callback
from fedspan.core.errors import at_least, not_negative
from fedspan.core.registry import register
from fedspan.engine.history import Mode

if TYPE_CHECKING:
    from fedspan.engine.loop import Loop, Row


@register
@dataclass(frozen=True)
class EarlyStopping(Callback):
    """End a run after `patience` evaluations without a better value.

    Args:
        metric: The metric to follow; by default the main one, of the validation set where there is one.
        mode: "max" if more of the metric is better, "min" if less is; by default as the metric says.
        patience: Evaluations without an improvement after which the run ends.
        min_delta: How much better a value must be to count as an improvement.
    """

    decides: ClassVar[bool] = True
    metric: str | None = None
    mode: Mode | None = None
    patience: int = 10
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        at_least("patience", self.patience, 1)
        not_negative("min_delta", self.min_delta)

    def on_evaluate(self, run: Loop, row: Row) -> None:
        """End the run when no seed has improved for `patience` evaluations."""
        metric, sign = judged(run, self.metric, self.mode)
        waits = []
        for lines in run.lines:
            if lines[-1].get("diverged"):
                continue
            best, waited = -float("inf"), 0  # on the history, so that a resumed run counts on
            for line in lines:
                if metric not in line:  # clients may be evaluated in some rounds only
                    continue
                value, waited = line[metric], waited + 1
                if value is not None and sign * value > best + self.min_delta:
                    best, waited = sign * value, 0
            waits.append(waited)
        if min(waits, default=0) >= self.patience:
            run.end(f"no better {metric} in {self.patience} evaluations")
