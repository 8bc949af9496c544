"""Tables of results, as (header, rows) for the page and the terminal, as Markdown, and as CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from typing import Any

from fedspan.study.budget import Budget, sized
from fedspan.study.curves import Axis, Tail
from fedspan.study.outcome import Outcome
from fedspan.study.pareto import reach
from fedspan.study.plan import Goal, Variant
from fedspan.study.series import Series, setting

Cells = tuple[list[str], list[list[str]]]
FRONTS: tuple[Axis, ...] = ("up", "total")
MEMORY = "client memory, MB"
PLAIN = ("round", "up_bytes", "down_bytes", "seconds")


def number(value: float, digits: int = 2) -> str:
    """6.23e-3, the way the tables write it."""
    if not math.isfinite(value):
        return "NaN"
    mantissa, exponent = f"{value:.{digits}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def scale_of(metric: str) -> int:
    """What a metric is multiplied by to be shown: accuracies are in per cent."""
    return 100 if metric == "accuracy" else 1


def shown(metric: str, tail: Tail) -> str:
    """A result in words: accuracies in per cent, perplexities as they are, other metrics as 6.23e-3."""
    if metric in ("accuracy", "perplexity"):
        return tail.text(f"{scale_of(metric) * tail.mean:.1f}", f"{scale_of(metric) * tail.spread:.1f}")
    return tail.text(number(tail.mean), number(tail.spread, 0))


def titled(metric: str) -> str:
    """A metric with its unit."""
    return f"{metric}, %" if metric == "accuracy" else metric


def point_of(outcome: Outcome, variant: Variant) -> str:
    """The chosen settings of a variant; * marks the edge of its grid."""
    point = outcome.chosen()[variant.name]
    star = "*" if outcome.at_edge(variant) else ""
    return ", ".join(setting(key, value) for key, value in point.items()) + star


def main(outcome: Outcome) -> Cells:
    """One row a variant: its result, and what it spent."""
    return equal_rounds(outcome) if outcome.comparison.budget is None else within_budget(outcome)


def equal_rounds(outcome: Outcome) -> Cells:
    """The result at equal rounds, at equal uplink and at equal total bytes."""
    plan = outcome.comparison
    up, both = outcome.budget("up"), outcome.budget("total")
    unit = ", %" if plan.metric == "accuracy" else ""
    header = ["method", "tuned", f"{plan.metric} after {plan.base['rounds']} rounds{unit}", f"best{unit}"]
    header += [f"at {sized(up)} up", f"at {sized(both)} both ways", "MB up", "MB both ways"]
    rows = []
    for variant in plan.variants:
        curve = outcome.curve(variant)
        results = [outcome.final(variant), outcome.best(variant)]
        results += [outcome.at(variant, "up", up), outcome.at(variant, "total", both)]
        sizes = [curve.up[-1], curve.up[-1] + curve.down[-1]]
        texts = [shown(plan.metric, tail) for tail in results]
        rows.append([variant.label, point_of(outcome, variant), *texts, *(f"{s / 1e6:.4g}" for s in sizes)])
    return header, rows


def within_budget(outcome: Outcome) -> Cells:
    """The result when the budget is spent, and where each could stand for what the least costly has spent."""
    plan = outcome.comparison
    assert plan.budget is not None
    unit = ", %" if plan.metric == "accuracy" else ""
    header = ["method", "tuned", f"{plan.metric} at {plan.budget.words()}{unit}", f"best{unit}"]
    others: dict[Axis, float] = {a: outcome.budget(a) for a in ("total", "round") if set(plan.budget.limits) != {a}}
    header += [f"{Budget({axis: most}).words()}, best of grid" for axis, most in others.items()]
    header += ["rounds", "MB up", "MB both ways"]
    rows = []
    for variant in plan.variants:
        curve = outcome.within(variant)
        results = [outcome.final(variant), outcome.best(variant)]
        results += [outcome.tuned_at(variant, axis, most) for axis, most in others.items()]
        texts = [shown(plan.metric, tail) for tail in results]
        sizes = [f"{curve.rounds[-1]:.0f}", *(f"{curve.spent(axis)[-1] / 1e6:.4g}" for axis in FRONTS)]
        rows.append([variant.label, point_of(outcome, variant), *texts, *sizes])
    return header, rows


def tuning(outcome: Outcome) -> Cells:
    """One row a point of every grid."""
    plan = outcome.comparison
    chosen = outcome.chosen()
    rows = []
    for variant in plan.variants:
        for trial in outcome.trials(variant):
            settings = ", ".join(f"{key} = {setting('name', value)}" for key, value in trial.point.items())
            mark = "chosen" if trial.point == chosen[variant.name] else ""
            rows.append([variant.label, settings, str(trial.rounds), shown(plan.metric, trial.end), mark])
    return ["method", "settings", "rounds", titled(plan.metric), ""], rows


def with_memory(cells: Cells, memories: Sequence[int | None]) -> Cells:
    """A table of one row a series with the client memory of each behind it, where that of any is known."""
    header, rows = cells
    if all(size is None for size in memories):
        return cells
    return [*header, MEMORY], [[*row, _megabytes(size)] for row, size in zip(rows, memories, strict=True)]


def records(
    series: Sequence[Series],
    metric: str,
    goal: Goal,
    states: Sequence[int | None] | None = None,
    memories: Sequence[int | None] = (),
) -> list[dict[str, Any]]:
    """One record of plain values a series; `states` are bytes that a client keeps, `memories` those of a local step."""
    fronts = {axis: reach(series, metric, goal, axis) for axis in FRONTS}
    out = []
    for place, one in enumerate(series):
        curve = one.curve(metric)
        last = curve.tail(1)
        record: dict[str, Any] = {"run": one.label, "seeds": last.seeds, "diverged": last.diverged}
        record |= {"failed": last.failed, "rounds": int(curve.rounds[-1]), "final": last, "best": curve.best(goal)}
        record |= {"up_bytes": int(curve.up[-1]), "down_bytes": int(curve.down[-1])}
        record |= {"client_state_bytes": states[place] if states else None, "seconds": float(curve.seconds[-1])}
        if any(size is not None for size in memories):
            record["client_memory_bytes"] = memories[place]
        out.append(record | {f"front_{axis}_bytes": fronts[axis].get(place) for axis in FRONTS})
    return out


def summary(found: Sequence[dict[str, Any]], metric: str) -> Cells:
    """Records as a table: final and best values over seeds, what was sent, and the part of the front that is theirs."""
    header = ["run", "seeds", "rounds", f"final {titled(metric)}", f"best {titled(metric)}", "MB up", "MB down"]
    header += ["client state, kB", MEMORY, "seconds", "on the front, MB up", "on the front, MB both ways"]
    rows = []
    for one in found:
        row = [
            one["run"],
            str(one["seeds"]),
            str(one["rounds"]),
            shown(metric, one["final"]),
            shown(metric, one["best"]),
        ]
        row += [f"{one[key] / 1e6:.4g}" for key in ("up_bytes", "down_bytes")]
        state = one["client_state_bytes"]
        row += ["" if state is None else f"{state / 1e3:.4g}", _megabytes(one.get("client_memory_bytes"))]
        row += [f"{one['seconds']:.1f}"]
        rows.append([*row, *(_range(one[f"front_{axis}_bytes"]) for axis in FRONTS)])
    return _without_empty(header, rows)


def markdown(cells: Cells) -> str:
    """A table as Markdown."""
    header, rows = cells
    lines = [[text.replace("|", "\\|") for text in line] for line in (header, ["---"] * len(header), *rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def results_csv(found: Sequence[dict[str, Any]]) -> str:
    """Records as CSV, with numbers as they are: a result is its mean and its standard deviation over seeds."""
    lines = []
    for record in found:
        line: dict[str, Any] = {}
        for key, value in record.items():
            if isinstance(value, Tail):
                line |= {f"{key}_mean": _plain(value.mean), f"{key}_sd": _plain(value.spread)}
            elif key.startswith("front_"):
                low, high = (_plain(end) for end in value or (math.nan, math.nan))
                line |= {f"{key}_from": low, f"{key}_to": high}
            else:
                line[key] = value
        lines.append(line)
    return _csv(lines)


def curves_csv(series: Sequence[Series], parts: Sequence[str] | None = None) -> str:
    """Every evaluation of every seed; `parts` names what each series is a part of."""
    lines = []
    for place, one in enumerate(series):
        named = {"part": parts[place]} if parts else {}
        for seed, rows in zip(one.seeds, one.runs, strict=True):
            for row in rows:
                values = {name: _plain(row[name]) for name in one.metrics if row[name] is not None}
                lines.append(named | {"run": one.label, "seed": seed} | {k: row[k] for k in PLAIN} | values)
    return _csv(lines)


def _csv(lines: Sequence[dict[str, Any]]) -> str:
    """Lines under the names of all their values; what a line does not have stays empty."""
    out = io.StringIO()
    table = csv.DictWriter(out, list(dict.fromkeys(key for line in lines for key in line)), lineterminator="\n")
    table.writeheader()
    table.writerows(lines)
    return out.getvalue()


def _plain(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else ""


def _megabytes(size: int | None) -> str:
    return "" if size is None else f"{size / 1e6:.4g}"


def _range(ends: tuple[float, float] | None) -> str:
    return "" if ends is None else " – ".join(f"{end / 1e6:.3g}" for end in dict.fromkeys(ends))


def _without_empty(header: list[str], rows: list[list[str]]) -> Cells:
    """Without the columns that say nothing."""
    keep = [n for n in range(len(header)) if any(row[n] for row in rows)]
    return [header[n] for n in keep], [[row[n] for n in keep] for row in rows]
