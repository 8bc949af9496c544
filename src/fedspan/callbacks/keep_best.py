"""Returns the best model of a run instead of the last one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from fedspan.core import checkpoint
from fedspan.core.callback import Callback
from fedspan.core.errors import CheckpointError, one_of
from fedspan.core.json_log import REMEDY, check_form
from fedspan.core.registry import register
from fedspan.core.wire import check_weights
from fedspan.engine.history import Mode, judged_by, sign_of
from fedspan.engine.provenance import BEST

if TYPE_CHECKING:
    from fedspan.engine.loop import Loop, Row
    from fedspan.engine.result import Result


@register
@dataclass(frozen=True)
class KeepBest(Callback):
    """Keeps the model with the best value of a metric; the result and the saved model are that one.

    `result.best`, `result.per_client.last` and the metrics of the result are those of that model.

    Args:
        metric: The metric to judge by; by default the main one, of the validation set where there is one.
        mode: "max" if more of the metric is better, "min" if less is; by default as the metric says.
    """

    metric: str | None = None
    mode: Mode | None = None
    _kept: dict[int, tuple[float, Any]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.mode is not None:
            one_of("mode", self.mode, ("min", "max"))

    def on_run_start(self, run: Loop) -> None:
        """Takes up the best model of an interrupted run."""
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
                own = {
                    n.removeprefix(f"{key}."): a
                    for n, a in arrays.items()
                    if n.startswith(f"{key}.")
                }
                check_weights(own, run.state_dict(int(key)), repr(str(path)))
                self._kept[int(key)] = (value, own)

    def on_evaluate(self, run: Loop, row: Row) -> None:
        """Keeps the model where it is the best so far."""
        improved = False
        for number, lines in enumerate(run.lines):
            metric = judged_by(lines, self.metric, run.metrics)
            sign, value = sign_of(metric, run.metrics, self.mode), lines[-1].get(metric)
            if value is None:
                continue
            signed = sign * value
            if number not in self._kept or signed > self._kept[number][0]:
                self._kept[number], improved = (signed, run.state_dict(number)), True
        if improved and run.run_dir is not None:
            self._save(run)

    def on_run_end(self, run: Loop, result: Result) -> None:
        """Puts the best models in the place of the last ones."""
        for number, (_, weights) in self._kept.items():
            result.weights[number] = weights
            metric = judged_by(run.lines[number], self.metric, run.metrics)
            known = [line for line in run.lines[number] if line.get(metric) is not None]
            sign = sign_of(metric, run.metrics, self.mode)
            result.model_rounds[run.seeds[number]] = int(
                max(known, key=lambda line: sign * line[metric])["round"]
            )

    def _save(self, run: Loop) -> None:
        assert run.run_dir is not None
        arrays: dict[str, torch.Tensor] = {}
        for number, (_, weights) in self._kept.items():
            arrays |= {f"{number}.{name}": value for name, value in weights.items()}
        meta = {
            "run": run.id,
            "round": run.t,
            "best": {str(number): value for number, (value, _) in self._kept.items()},
        }
        checkpoint.save(run.run_dir / BEST, arrays, meta)
