"""Where a callback writes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedspan.core.callback import Callback
from fedspan.core.errors import SpecError

if TYPE_CHECKING:
    from fedspan.engine.loop import Loop


def folder_of(callback: Callback, log_dir: str | Path | None, run: Loop) -> Path:
    """The callback's own directory, or else that of the run."""
    place = log_dir or run.run_dir
    if place is None:
        raise SpecError(f"{type(callback).__name__} needs `log_dir` where the run has no `run_dir`")
    return Path(place)
