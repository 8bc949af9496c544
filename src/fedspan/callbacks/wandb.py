"""Log evaluations to Weights & Biases, offline by default."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedspan.callbacks._base import Logger, Tracker
from fedspan.core.extras import needs
from fedspan.core.registry import register


@register
@dataclass(frozen=True)
class WandB(Logger):
    """Write a W&B run to disk, which `wandb sync` uploads. The environment's WANDB_MODE overrides "offline".

    Args:
        project: The W&B project.
    """

    project: str = "fedspan"

    def __post_init__(self) -> None:
        needs("wandb", "wandb")

    def open(self, folder: Path, name: str, t: int, settings: dict[str, Any]) -> Tracker:
        import wandb

        run = wandb.init(
            project=self.project,
            name="/".join((folder / name).parts[-2:]),
            dir=str(folder),
            config=settings,
            mode=os.environ.get("WANDB_MODE", "offline"),
            reinit="create_new",  # seeds of one batched computation are runs side by side
        )
        return lambda values, t: run.log(values, step=t), run.finish
