"""Keep the model of every n-th round as a file of weights."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedspan.callbacks._base import Writer
from fedspan.core import checkpoint
from fedspan.core.errors import at_least
from fedspan.core.files import make_dir
from fedspan.core.registry import register

if TYPE_CHECKING:
    from fedspan.engine.loop import Loop


@register
@dataclass(frozen=True)
class Checkpoint(Writer):
    """Write `models/round-000010.safetensors` and so on, which `model.load_state_dict(load_file(path))` takes.

    A run that is interrupted continues from its own checkpoint in the run directory; it does not need this callback.

    Args:
        every: Rounds between two models.
        keep: How many of the latest models are kept. None keeps all.
        log_dir: Where `models` is; by default the run directory.
    """

    every: int = 10
    keep: int | None = None

    def __post_init__(self) -> None:
        at_least("every", self.every, 1)
        if self.keep is not None:
            at_least("keep", self.keep, 1)

    def on_round_end(self, run: Loop) -> None:
        """Write the model of each seed."""
        if run.t % self.every:
            return
        folder = self.folder(run)
        for number, seed in enumerate(run.seeds):
            place = (folder if len(run.seeds) == 1 else folder / f"seed-{seed}") / "models"
            make_dir(place)
            checkpoint.write_tensors(
                place / f"round-{run.t:06}.safetensors", run.state_dict(number)
            )
            for old in sorted(place.glob("round-*.safetensors"))[: -(self.keep or sys.maxsize)]:
                old.unlink()
