"""Logs evaluations to TensorBoard."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedspan.callbacks._sinks import Logger, Sink, Values
from fedspan.core.extras import needs
from fedspan.core.registry import register


@register
@dataclass(frozen=True)
class TensorBoard(Logger):
    """Writes scalars to an event file, which `tensorboard --logdir` shows."""

    def __post_init__(self) -> None:
        needs("tensorboard", "tensorboard")

    def open(self, folder: Path, name: str, t: int, settings: dict[str, Any]) -> Sink:
        return _Events(folder / "tensorboard" / name, t)


class _Events:
    def __init__(self, folder: Path, t: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What an interrupted run has logged beyond its checkpoint is hidden: it comes again.
        self.writer: Any = SummaryWriter(str(folder), purge_step=t)

    def log(self, values: Values, t: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, t)

    def close(self) -> None:
        self.writer.close()
