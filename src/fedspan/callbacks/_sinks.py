"""What loggers share: the numbers of each seed's evaluations go to a sink of its own, opened at the first one."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fedspan.callbacks._places import folder_of
from fedspan.core.building import describe
from fedspan.core.callback import Callback

if TYPE_CHECKING:
    from fedspan.engine.loop import Loop, Row
    from fedspan.engine.result import Result

Values = dict[str, float]


class Sink(Protocol):
    """Where the evaluations of one seed go."""

    def log(self, values: Values, t: int) -> None:
        """Takes the numbers of round t."""

    def close(self) -> None:
        """No more will come."""


@dataclass(frozen=True)
class Logger(Callback):
    """Sends every evaluation to a tracker.

    Args:
        log_dir: Where the tracker writes; by default the run directory.
    """

    log_dir: str | Path | None = None
    _sinks: dict[int, Sink] = field(default_factory=dict, init=False, repr=False, compare=False)

    @abstractmethod
    def open(self, folder: Path, name: str, t: int, settings: dict[str, Any]) -> Sink:
        """A sink in a directory; `name` is that of a seed among several, `t` the first round it is given."""

    def on_run_start(self, run: Loop) -> None:
        """Refuses a run that has no directory to log to."""
        folder_of(self, self.log_dir, run)
        self._sinks.clear()

    def on_evaluate(self, run: Loop, row: Row) -> None:
        """Each seed's numbers to its sink; a seed that has diverged gets no more."""
        folder = folder_of(self, self.log_dir, run)
        for number, lines in enumerate(run.lines):
            line: dict[str, Any] = lines[-1]
            if line["round"] != row.round:
                continue
            if number not in self._sinks:
                name = f"seed-{run.seeds[number]}" if len(run.seeds) > 1 else ""
                self._sinks[number] = self.open(folder, name, row.round, _settings(run, number))
            names = [name for name in line if name not in ("round", "events", "diverged")]
            self._sinks[number].log(
                {name: line[name] for name in names if line[name] is not None}, row.round
            )

    def on_run_end(self, run: Loop, result: Result) -> None:
        """Closes the sinks."""
        self.on_run_error(run)

    def on_run_error(self, run: Loop) -> None:
        """Closes the sinks."""
        for sink in self._sinks.values():
            sink.close()


def _settings(run: Loop, number: int) -> dict[str, Any]:
    """What a tracker shows beside a run's curves."""
    counts = {"clients": run.problem.clients, "clients_per_round": run.clients_per_round}
    return {"seed": run.seeds[number], "method": describe(run.method), **counts}
