"""Callbacks: what is told of a run while it goes on, and may end it. One file each in `fedspan/callbacks`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from fedspan.engine.loop import Loop, Row


class Callback:
    """Base class of callbacks; every hook is optional.

    `run` is the loop of the run: `run.t` rounds are done, `run.lines` are the evaluations of each seed,
    `run.model()` is the server's model, `run.run_dir` the run directory or None, and `run.end("reason")` ends the run
    after the current round.
    """

    needs_all_clients: ClassVar[bool] = False  # whether it uses data and states that only a simulation has
    decides: ClassVar[bool] = False  # whether a run with it has other rows than one without it

    def on_run_start(self, run: Loop) -> None:
        """Before the first round. A resumed run has its earlier evaluations in `run.lines`."""

    def on_round_end(self, run: Loop) -> None:
        """After every round."""

    def measure(self, run: Loop) -> Mapping[str, npt.NDArray[np.float64]]:
        """More metrics for a row: name → one number per seed."""
        return {}

    def on_evaluate(self, run: Loop, row: Row) -> None:
        """After every evaluation."""

    def on_run_end(self, run: Loop, result: Any) -> None:
        """After the last round, also when the run was interrupted; `result` is the run's `Result`."""
