"""Log evaluations to TensorBoard."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedspan.callbacks._base import Logger, Tracker
from fedspan.core.extras import needs
from fedspan.core.registry import register


@register
@dataclass(frozen=True)
class TensorBoard(Logger):
    """Write scalars to an event file, which `tensorboard --logdir` shows."""

    def __post_init__(self) -> None:
        needs("tensorboard", "tensorboard")

    def open(self, folder: Path, name: str, t: int, settings: dict[str, Any]) -> Tracker:
        from torch.utils.tensorboard import SummaryWriter

        # What an interrupted run has logged beyond its checkpoint is hidden: it comes again.
        writer = SummaryWriter(str(folder / "tensorboard" / name), purge_step=t)

        def log(values: dict[str, float], t: int) -> None:
            for key, value in values.items():
                writer.add_scalar(key, value, t)

        return log, writer.close
