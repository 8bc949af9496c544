"""The evaluations of a run: `history.jsonl`, and which of its metrics a run is judged by.

The first line of the file has the spec and versions, and so has a line at every resume; every other one is a row. A
line is written in one piece and has a checksum. After a crash the last line may be cut short: it is dropped on reading.
A line that was changed is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from fedspan.core import registry
from fedspan.core.errors import CheckpointError, SpecError, one_of
from fedspan.core.json_log import REMEDY, check_form, fits, read_lines
from fedspan.core.method import DETAILS
from fedspan.core.metric import column_of, direction_of
from fedspan.engine.loop import Line, Row

NAME = "history.jsonl"
SPEC = {  # of what others read in it
    "seed": int, "rounds": int, "metrics": list[Any], "method": dict[str, Any], "task": dict[str, Any],
    "participation": dict[str, Any],
}  # fmt: skip
COSTS = {"round": int, "up_bytes": int, "down_bytes": int, "seconds": float}  # of a row
OTHERS = {"events": list[str], "diverged": bool, "hours": float}
# What an evaluation has besides its metrics, and one of a client
PLAIN = ("seed", *COSTS, *OTHERS, "client", "data", "examples")

Mode = Literal["min", "max"]
HELD_OUT = "validation_"
PREFIX = re.compile("^(validation|clients|worst)_")
# Columns by which nothing is judged unless they are named: of privacy, of methods, of `Diagnostics`.
ASIDE = (
    "epsilon", "clip", *DETAILS, "grad_sq", "drift", "control_error", "control_gap", "correction_cos",
)  # fmt: skip
# Columns of tasks and callbacks, which no metric speaks for.
LOWER = re.compile(r"(^|_)(loss|err|error|grad_sq|drift)$")
HIGHER = re.compile(r"(^|_)(score|accuracy)$")


def line_of(row: Row, run: int) -> Line:
    """One run's part of a row; numbers that are not finite become null."""
    line: Line = {
        "round": row.round,
        "up_bytes": int(row.up_bytes[run]),
        "down_bytes": int(row.down_bytes[run]),
        "seconds": round(row.seconds, 4),
    }
    if row.hours is not None:
        line["hours"] = row.hours
    for name, values in row.metrics.items():
        value = float(values[run])
        line[name] = value if math.isfinite(value) else None
    if row.events:
        line["events"] = list(row.events)
    return line | {"diverged": True} if row.diverged[run] else line


def read(path: Path, until: str | None = None) -> tuple[Line, list[Line]]:
    """(the latest line with a spec, rows) of a history file, up to the line that a checkpoint names, if any."""
    if not path.is_file():
        raise CheckpointError(f"no history at {str(path)!r}")
    lines, _ = read_lines(path, until)
    if until == "":
        return {}, []
    if not lines or "spec" not in lines[0]:
        raise CheckpointError(
            f"{str(path)!r} does not begin with a spec; it is not a fedspan history"
        )
    header = [line for line in lines if "round" not in line][-1]
    rows = [line for line in lines if "round" in line]
    spec = check_form(header, path, {"spec": dict[str, Any]}, {"seed": int})["spec"]
    check_form(spec, path, {}, SPEC)
    for key, name in {"method": "name", "task": "name", "participation": "weights"}.items():
        check_form(spec.get(key, {name: ""}), path, {name: str})
    if not _plain(spec):
        raise CheckpointError(
            f"{str(path)!r} is damaged: its spec holds null, NaN or infinity; {REMEDY}"
        )
    first = {"round": -1, "up_bytes": 0, "down_bytes": 0}
    for before, row in zip([first, *rows], rows, strict=False):
        check_form(row, path, COSTS, dict.fromkeys(row, float | None) | OTHERS)
        for key in first:  # no run could have written a row where one falls
            if row[key] < before[key] + (key == "round"):
                raise CheckpointError(
                    f"{str(path)!r} is damaged: {key!r} falls to {row[key]}; {REMEDY}"
                )
    return header, rows


def base(metric: str) -> str:
    """Return the name of a metric without the part that says whose examples it is of."""
    return PREFIX.sub("", metric)


def _plain(value: Any) -> bool:
    """Whether a spec holds values that it could be made of."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return fits(value, float | str | bool | dict[str, Any] | list[Any]) and all(map(_plain, inner))


# Which metric a run is judged by. `given` is what it has as `metrics`: names, classes, objects and functions, or what
# its table tells of them.


def higher_is_better(metric: str, given: Sequence[Any] = ()) -> bool | None:
    """Whether more of a metric is better, as the metric says, or the name of a column that is none; None: unknown."""
    name = base(metric)
    for one in given:
        if isinstance(one, Mapping) and one["name"] == name:
            return cast(bool | None, one.get("higher_is_better"))
        if not isinstance(one, str | Mapping) and column_of(one) == name:
            return direction_of(one)
    if (known := registry.choices("metric").get(name)) is not None:
        return bool(cast(Any, known).higher_is_better)
    return False if LOWER.search(name) else True if HIGHER.search(name) else None


def undefined_where(metric: str) -> str:
    """Why a metric may have no value, as the end of a sentence; empty where nobody says."""
    needs = getattr(registry.choices("metric").get(base(metric)), "needs", "")
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
    sure = {*registry.choices("metric"), "loss", "training_loss", *_names(given)}
    if known not in (None, higher) and base(metric) in sure:
        better = "more" if known else "less"
        raise SpecError(
            f"`{option}` is {mode!r}, but {better} of the metric {metric!r} is better; leave `{option}` out"
        )
    if higher is None:
        own = f"set {base(metric)}.higher_is_better = True or False before the run"
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
    for one in among:
        known = not one.endswith("loss") and higher_is_better(one, given) is not None
        if base(one) in own or known:
            return one
    return among[0]


def metrics_of(lines: Sequence[Line]) -> list[str]:
    """Return the names of the metrics that evaluations have."""
    return list(dict.fromkeys(name for line in lines for name in line if name not in PLAIN))


def judged_by(lines: Sequence[Line], metric: str | None, given: Sequence[Any] = ()) -> str:
    """Return the metric asked for, or the main one; refused where the evaluations do not have it."""
    names = metrics_of(lines)
    if not names:
        raise SpecError(
            "nothing is evaluated: give `test` or `validation`, or leave such callbacks out"
        )
    if metric is None:
        return main_metric(names, given)
    if metric.startswith(HELD_OUT) and not any(name.startswith(HELD_OUT) for name in names):
        raise SpecError(
            f"`metric` is {metric!r}, but there is no validation data; give `validation`, or use one of "
            f"{', '.join(names)}"
        )
    one_of("metric", metric, names)
    return metric
