"""The training loss of every evaluation, on a fixed sample of the clients' data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedspan.core.callback import Callback
from fedspan.core.registry import register

if TYPE_CHECKING:
    from fedspan.core.layout import Measures
    from fedspan.engine.loop import Loop

NAME = "training_loss"


@register
@dataclass(frozen=True, kw_only=True)
class TrainingLoss(Callback):
    """Report `training_loss` at every evaluation: the mean loss on up to 64 examples each of up to 10 clients."""

    needs_all_clients: ClassVar[bool] = True

    def measure(self, run: Loop) -> Measures:
        """Return the loss; nothing where the task has no training loss."""
        found = run.problem.training_loss(run.model(), run.buffers)
        return {} if found is None else {NAME: found}
