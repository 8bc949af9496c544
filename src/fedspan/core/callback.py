"""Callbacks: what is told of a run while it goes on, and may end it. One file each in `fedspan/callbacks`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from fedspan.core.layout import Measures
    from fedspan.engine.loop import Loop, Row


class Callback:
    """Base class of callbacks; every hook is optional.

    A run calls `on_run_start` once, then `on_round_end` after every round and `on_evaluate` after every evaluation
    (before the first round, every `eval_every` rounds and at the end), and `on_run_end` once. Callbacks are called in
    the order in which they are given. A callback must not change the model.

    `run` is the loop of the run:

    - `run.t`: the number of rounds that are done.
    - `run.lines`: the evaluations so far, one list of dictionaries per seed; `run.lines[0][-1]` is the latest one.
    - `run.seeds`, `run.method`, `run.problem`: what is run.
    - `run.run_dir`: the run directory, or None.
    - `run.model()`: the server's model as one flat vector; `run.state_dict()` as tensors by name.
    - `run.end("reason")`: ends the run after the current round. It is evaluated once more, and its status is
      "stopped at round t: reason".

    In a spec a callback is a table of `[[callbacks]]` with its `name`; a file of your own is loaded by `--plugin`.
    """

    needs_all_clients: ClassVar[bool] = False  # whether it uses what only a simulation has
    decides: ClassVar[bool] = False  # whether a run with it has other rows than one without it

    def on_run_start(self, run: Loop) -> None:
        """Called before the first round. A resumed run has its earlier evaluations in `run.lines`."""

    def on_round_end(self, run: Loop) -> None:
        """Called after every round."""

    def measure(self, run: Loop) -> Measures:
        """More metrics of an evaluation: name → one number per seed. Called before `on_evaluate`."""
        return {}

    def on_evaluate(self, run: Loop, row: Row) -> None:
        """Called after every evaluation. `row` has one number per seed; `run.lines` has the same by seed."""

    def on_run_end(self, run: Loop, result: Any) -> None:
        """Called after the last round, also where the run was interrupted; `result` is the run's `Result`."""

    def on_run_error(self, run: Loop) -> None:
        """Called in place of `on_run_end` where the run fails with an exception: closes what is open."""
