"""What callbacks share: a directory to write to, a tracker for each seed, a metric to judge by."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedspan.core.callback import Callback
from fedspan.core.errors import SpecError
from fedspan.core.tables import describe
from fedspan.engine.history import Mode, judged_by, sign_of

if TYPE_CHECKING:
    from fedspan.engine.loop import Loop, Row

Tracker = tuple[Callable[[dict[str, float], int], Any], Callable[[], Any]]
"""Functions that log the values of a round, and that close the tracker."""


@dataclass(frozen=True)
class Writer(Callback):
    """A callback that writes to `log_dir`, or else to the run directory."""

    log_dir: str | Path | None = None

    def folder(self, run: Loop) -> Path:
        """Return the directory; refuse a run that has none."""
        place = self.log_dir or run.run_dir
        if place is None:
            raise SpecError(f"{type(self).__name__} needs `log_dir` where the run has no `run_dir`")
        return Path(place)

    def on_run_start(self, run: Loop) -> None:
        """Refuse a run that has no directory to write to."""
        self.folder(run)


@dataclass(frozen=True)
class Logger(Writer):
    """Send the evaluations of each seed to a tracker of its own, opened at the first one.

    Args:
        log_dir: Where the tracker writes; by default the run directory.
    """

    _trackers: dict[int, Tracker] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @abstractmethod
    def open(self, folder: Path, name: str, t: int, settings: dict[str, Any]) -> Tracker:
        """Return a tracker; `name` is that of a seed among several, `t` the first round it is given."""

    def on_run_start(self, run: Loop) -> None:
        """Refuse a run that has no directory to log to."""
        super().on_run_start(run)
        self._trackers.clear()

    def on_evaluate(self, run: Loop, row: Row) -> None:
        """Log the values of each seed; a seed that has diverged gets no more."""
        for number, lines in enumerate(run.lines):
            line: dict[str, Any] = lines[-1]
            if line["round"] != row.round:
                continue
            if number not in self._trackers:
                name = f"seed-{run.seeds[number]}" if len(run.seeds) > 1 else ""
                settings = {
                    "seed": run.seeds[number],
                    "method": describe(run.method),
                    "clients": run.problem.clients,
                    "clients_per_round": run.clients_per_round,
                }
                self._trackers[number] = self.open(self.folder(run), name, row.round, settings)
            aside = ("round", "events", "diverged")
            values = {k: v for k, v in line.items() if k not in aside and v is not None}
            log, _ = self._trackers[number]
            log(values, row.round)

    def on_run_end(self, run: Loop, result: object = None) -> None:
        """Close the trackers."""
        for _, close in self._trackers.values():
            close()

    on_run_error = on_run_end


def judged(run: Loop, metric: str | None, mode: Mode | None, number: int = 0) -> tuple[str, int]:
    """Return the metric that a run is judged by, and the sign with which more of it is better."""
    metric = judged_by(run.lines[number], metric, run.metrics)
    return metric, sign_of(metric, run.metrics, mode)
