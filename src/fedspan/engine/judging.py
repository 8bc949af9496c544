"""Which metric a run is judged by, and whether more of it is better.

`given` is what a run has as `metrics`: names, classes, objects and functions, or what its table tells of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from fedspan.core import registry
from fedspan.core.errors import SpecError, one_of
from fedspan.core.method import DETAILS
from fedspan.core.metric import column_of, direction_of
from fedspan.engine.loop import Line

Mode = Literal["min", "max"]
HELD_OUT = "validation_"
COSTS = (
    "round",
    "up_bytes",
    "down_bytes",
    "seconds",
)  # what every evaluation has besides its metrics
PLAIN = ("seed", *COSTS, "diverged", "events")
# Columns by which nothing is judged unless they are named: of privacy, of methods, of `Diagnostics`.
ASIDE = (
    "epsilon",
    "clip",
    *DETAILS,
    "grad_sq",
    "drift",
    "control_error",
    "control_gap",
    "correction_cos",
)
# Columns of tasks and callbacks, which no metric speaks for.
LOWER, HIGHER = (
    re.compile(r"(^|_)(loss|err|error|grad_sq|drift)$"),
    re.compile(r"(^|_)(score|accuracy)$"),
)


def higher_is_better(metric: str, given: Sequence[Any] = ()) -> bool | None:
    """Whether more of a metric is better, as the metric says, or the name of a column that is none; None: unknown."""
    name = metric.removeprefix(HELD_OUT)
    for one in given:
        if isinstance(one, Mapping) and one["name"] == name:
            return cast(bool | None, one.get("higher_is_better"))
        if not isinstance(one, str | Mapping) and column_of(one) == name:
            return direction_of(one)
    known = registry.choices("metric").get(name)
    if known is not None:
        return bool(cast(Any, known).higher_is_better)
    return False if LOWER.search(name) else True if HIGHER.search(name) else None


def undefined_where(metric: str) -> str:
    """Why a metric may have no value, as the end of a sentence; empty where nobody says."""
    needs = getattr(registry.choices("metric").get(metric.removeprefix(HELD_OUT)), "needs", "")
    return f": it needs {needs}" if needs else ""


def sign_of(
    metric: str, given: Sequence[Any], mode: Mode | None = None, option: str = "mode"
) -> int:
    """Return 1 where more of a metric is better and -1 where less is; refused where nobody says.

    Args:
        metric: The name of its column.
        given: The run's `metrics`.
        mode: What the user says.
        option: What `mode` is called where the user gives it; empty where it cannot be given.
    """
    known = higher_is_better(metric, given)
    higher = known if mode is None else mode == "max"
    guessed = metric.removeprefix(HELD_OUT) not in {
        *registry.choices("metric"),
        "loss",
        "training_loss",
        *_names(given),
    }
    if known not in (None, higher) and not guessed:
        better = "more" if known else "less"
        raise SpecError(
            f"`{option}` is {mode!r}, but {better} of the metric {metric!r} is better; leave `{option}` out"
        )
    if higher is None:
        own = f"set {metric.removeprefix(HELD_OUT)}.higher_is_better = True or False before the run"
        how = f"give {option}='min' or 'max', or {own}" if option else own
        raise SpecError(
            f"whether more or less of the metric {metric!r} is better is not known; {how}"
        )
    return 1 if higher else -1


def _names(given: Sequence[Any]) -> set[str]:
    """The columns of a run's own metrics."""
    return {one["name"] if isinstance(one, Mapping) else column_of(one) for one in given}


def main_metric(names: Sequence[str], given: Sequence[Any] = ()) -> str:
    """Return the metric to judge by: of the validation set before the test set, and before the loss.

    A column that a callback adds counts where its name says what is better.
    """
    own = _names(given)
    among = [name for name in names if name not in ASIDE]
    among = [name for name in among if name.startswith(HELD_OUT)] or among or list(names)
    meant = (one for one in among if not one.endswith("loss") or one.removeprefix(HELD_OUT) in own)
    known = (
        one
        for one in meant
        if one.removeprefix(HELD_OUT) in own or higher_is_better(one, given) is not None
    )
    return next(known, among[0])


def judged_by(lines: Sequence[Line], metric: str | None, given: Sequence[Any] = ()) -> str:
    """Return the metric asked for, or the main one; refused where the evaluations do not have it."""
    names = [name for name in lines[-1] if name not in PLAIN]
    if not names:
        raise SpecError(
            "nothing is evaluated: give `test` or `validation`, or leave such callbacks out"
        )
    if metric is not None:
        if metric.startswith(HELD_OUT) and not any(name.startswith(HELD_OUT) for name in names):
            raise SpecError(
                f"`metric` is {metric!r}, but there is no validation data; give `validation`, or use one of "
                f"{', '.join(names)}"
            )
        one_of("metric", metric, names)
    return metric or main_metric(names, given)
