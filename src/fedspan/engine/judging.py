"""Which metric a run is judged by, and whether more of it is better."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from fedspan.core import registry
from fedspan.core.errors import SpecError, one_of
from fedspan.engine.loop import Line

COSTS = ("round", "up_bytes", "down_bytes", "seconds")  # what every evaluation has besides its metrics
PLAIN = ("seed", *COSTS, "diverged", "events")
SPENT = ("epsilon", "clip")  # what privacy tells in every evaluation, by which nothing is judged
LOWER_IS_BETTER = ("loss", "err", "grad_sq", "drift")


def higher_is_better(metric: str) -> bool:
    """Whether more of a metric is better: as the metric says, or by its name where it is none of `fedspan.metrics`."""
    known = registry.choices("metric").get(metric.removeprefix("validation_"))
    if known is not None:
        return bool(cast(Any, known).higher_is_better)
    return not any(word in metric for word in LOWER_IS_BETTER)


def main_metric(names: Sequence[str]) -> str:
    """The metric to judge by: of the validation set before the test set, and before the loss."""
    validation = [name for name in names if name.startswith("validation_")]
    among = validation or [name for name in names if name not in SPENT] or list(names)
    return next((name for name in among if not name.endswith("loss")), among[0])


def judged_by(lines: Sequence[Line], metric: str | None) -> str:
    """The metric asked for, or the main one; refused where the evaluations do not have it."""
    names = [name for name in lines[-1] if name not in PLAIN]
    if not names:
        raise SpecError("nothing is evaluated: give `test` or `validation`, or leave such callbacks out")
    if metric is not None:
        held_out = "validation_"
        if metric.startswith(held_out) and not any(name.startswith(held_out) for name in names):
            raise SpecError(
                f"`metric` is {metric!r}, but there is no validation data; give `validation`, or use one of "
                f"{', '.join(names)}"
            )
        one_of("metric", metric, names)
    return metric or main_metric(names)
