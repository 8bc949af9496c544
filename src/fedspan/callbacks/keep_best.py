"""Return the best model of a run instead of the last one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fedspan.callbacks._base import judged
from fedspan.core import checkpoint
from fedspan.core.callback import Callback
from fedspan.core.errors import CheckpointError
from fedspan.core.json_log import REMEDY, check_form
from fedspan.core.layout import Arrays
from fedspan.core.registry import register
from fedspan.core.wire import check_weights
from fedspan.engine.history import Mode
from fedspan.engine.provenance import BEST

if TYPE_CHECKING:
    from fedspan.engine.loop import Loop, Row
    from fedspan.engine.result import Result


@register
@dataclass(frozen=True)
class KeepBest(Callback):
    """Keep the model with the best value of a metric; the result and the saved model are that one.

    `result.best`, `result.per_client.last` and the metrics of the result are those of that model.

    Args:
        metric: The metric to judge by; by default the main one, of the validation set where there is one.
        mode: "max" if more of the metric is better, "min" if less is; by default as the metric says.
    """

    metric: str | None = None
    mode: Mode | None = None
    _kept: dict[int, tuple[float, Arrays]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def on_run_start(self, run: Loop) -> None:
        """Take up the best model of an interrupted run."""
        self._kept.clear()
        if run.run_dir is not None and any(run.lines):
            path = run.run_dir / BEST
            arrays, meta = checkpoint.load(path)
            check_form(meta, path, {"run": str, "best": dict[str, float]})
            if meta["run"] != run.id:
                raise CheckpointError(f"{str(path)!r} is of another run; put back that of this run")
            if not meta["best"].keys() <= set(map(str, range(len(run.seeds)))):
                raise CheckpointError(f"{str(path)!r} is damaged: it is of other seeds; {REMEDY}")
            for key, value in meta["best"].items():
                place = f"{key}."
                own = {k.removeprefix(place): v for k, v in arrays.items() if k.startswith(place)}
                check_weights(own, run.state_dict(int(key)), repr(str(path)))
                self._kept[int(key)] = (value, own)

    def on_evaluate(self, run: Loop, row: Row) -> None:
        """Keep the model where it is the best so far."""
        improved = False
        for number, lines in enumerate(run.lines):
            metric, sign = judged(run, self.metric, self.mode, number)
            value = lines[-1].get(metric)
            if value is not None and sign * value > self._kept.get(number, (-math.inf,))[0]:
                self._kept[number], improved = (sign * value, run.state_dict(number)), True
        if not improved or run.run_dir is None:
            return
        arrays = {
            f"{number}.{name}": array
            for number, (_, weights) in self._kept.items()
            for name, array in weights.items()
        }
        best = {str(number): value for number, (value, _) in self._kept.items()}
        meta = {"run": run.id, "round": run.t, "best": best}
        checkpoint.save(run.run_dir / BEST, arrays, meta)

    def on_run_end(self, run: Loop, result: Result) -> None:
        """Put the best models in the place of the last ones."""
        for number, (_, weights) in self._kept.items():
            result.weights[number] = weights
            metric, sign = judged(run, self.metric, self.mode, number)
            known = [line for line in run.lines[number] if line.get(metric) is not None]
            _, best = max((sign * line[metric], -line["round"]) for line in known)  # the first
            result.model_rounds[run.seeds[number]] = int(-best)
