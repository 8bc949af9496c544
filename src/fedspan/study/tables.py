"""Tables of results: for the page and the terminal, as Markdown, and as CSV."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedspan.core import registry
from fedspan.core.files import csv_text
from fedspan.study.budget import UNITS
from fedspan.study.curves import Axis, Tail
from fedspan.study.model import Part, in_percent, name_of, settings
from fedspan.study.pareto import reach
from fedspan.study.published import SIGNS, judge, number
from fedspan.study.results import Entry
from fedspan.study.series import Series

PARETO: tuple[Axis, ...] = ("up", "total")
MEMORY = "client memory, MB"
MEMORY_NOTE = (
    "Client memory is the peak of one local step with the largest batch. It is computed by a dry run on tensors "
    "without data, as in `fedspan plan --model`; steps of FedIT and FFA-LoRA are those of PEFT's adapters. "
    "What a client keeps between rounds is not included."
)


@dataclass(frozen=True)
class Cell:
    """An entry of a table; `small` stands below it, and `mark` colors that: yes, no or empty."""

    main: str
    small: str = ""
    mark: str = ""


@dataclass(frozen=True)
class Grid:
    """A table; one with a title is folded away on the page."""

    header: list[str]
    rows: list[list[Cell | str]]
    title: str = ""

    def texts(self) -> list[list[str]]:
        """The rows as plain text."""
        return [[_text(cell) for cell in row] for row in self.rows]

    def markdown(self) -> str:
        """The table as Markdown."""
        lines = [self.header, ["---"] * len(self.header), *self.texts()]
        return "".join(
            f"| {' | '.join(text.replace('|', chr(92) + '|') for text in line)} |\n"
            for line in lines
        )


def _text(cell: Cell | str) -> str:
    if isinstance(cell, str):
        return cell
    return f"{cell.main} ({cell.small})" if cell.small else cell.main


def scale_of(metric: str) -> int:
    """What a metric is multiplied by to be shown: accuracies are in percent."""
    return 100 if in_percent(metric) else 1


def shown(metric: str, tail: Tail) -> str:
    """A result in words: accuracies in percent, metrics of `fedspan.metrics` as they are, errors as 6.23e-3."""
    if in_percent(metric) or metric == "perplexity":
        return tail.text(
            f"{scale_of(metric) * tail.mean:.1f}", f"{scale_of(metric) * tail.spread:.1f}"
        )
    if metric.removeprefix("validation_") in registry.choices("metric"):
        return tail.text(f"{tail.mean:.4g}", f"{tail.spread:.2g}")
    return tail.text(number(tail.mean), number(tail.spread, 0))


def titled(metric: str) -> str:
    """A metric in words with its unit."""
    return f"{name_of(metric)}, %" if in_percent(metric) else name_of(metric)


def _best(metric: str) -> str:
    """The heading of the best evaluation, which says where it was chosen on the test set."""
    name, unit = name_of(metric), ", %" if in_percent(metric) else ""
    said = metric == "rel_err" or name.startswith(("test ", "training ", "validation "))
    return f"best {name}{'' if said else ' on the test set'}{unit}"


def point_of(entry: Entry) -> str:
    """The chosen settings of an entry; * marks the end of its grid."""
    found = [f"lr {entry.found_lr[0]:.3g} (searched)"] if entry.found_lr else []
    point = {key: value for key, value in entry.point.items() if not found or key != "method.lr"}
    return ", ".join([settings(point) + "*" * entry.at_edge] * bool(point) + found)


def results(part: Part, entries: Sequence[Entry]) -> Grid:
    """The main table of a part: one row per variant, or per row of the part with one column per variant."""
    return _by_variant(part, entries) if len(part.rows) == 1 else _by_row(part, entries)


def ranked(part: Part, entries: Sequence[Entry]) -> list[Entry]:
    """The entries from the best result to the worst; those without a result in every seed come last."""
    sign = -1 if part.goal == "max" else 1
    return sorted(
        entries,
        key=lambda one: (not one.final.whole, sign * one.final.mean if one.final.whole else 0.0),
    )


def _by_variant(part: Part, entries: Sequence[Entry]) -> Grid:
    """The result, the best evaluation, results at equal cost, and what was spent; the best method first."""
    entries = ranked(part, entries)
    unit = ", %" if in_percent(part.metric) else ""
    length = (
        f"after {part.base['rounds']} rounds"
        if part.budget is None
        else f"at {part.budget.words()}"
    )
    header = [
        "method",
        "tuned",
        f"{name_of(part.metric)} {length}{unit}",
        _best(part.metric),
        *entries[0].at,
    ]
    byte, size = unit_of(part, entries)
    header += [*(["rounds"] if part.budget else []), f"{byte} up", f"{byte} both ways"]
    header += ["published, final", "published, best"]
    rows: list[list[Cell | str]] = []
    for entry in entries:
        curve = entry.curve(part)
        texts = [shown(part.metric, tail) for tail in (entry.final, entry.best, *entry.at.values())]
        lengths = [f"{curve.rounds[-1]:.0f}"] if part.budget else []
        sizes = [f"{curve.spent(axis)[-1] / size:.4g}" for axis in PARETO]
        two = part.rows[0].published.get(entry.variant)
        published = [f"{value:.1f}" for value in two] if isinstance(two, list) else ["", ""]
        rows.append([entry.series.label, point_of(entry), *texts, *lengths, *sizes, *published])
    for row, entry in zip(rows, entries, strict=True):
        row += [_scaled(entry.client_memory, 1e6), projected(entry)]
    return _without_empty([*header, MEMORY, "projected parameters"], rows, keep=len(header) - 2)


def unit_of(part: Part, entries: Sequence[Entry]) -> tuple[str, float]:
    """The unit of bytes in the tables and on the axes of a part, and its size: that of the most that was sent."""
    most = max(
        (float(one.series.curve(part.metric).spent("total")[-1]) for one in entries), default=0.0
    )
    return next((one for one in reversed(UNITS.items()) if most >= one[1]), ("B", 1.0))


def projected(entry: Entry) -> str:
    """How many parameters a method of a subspace projects; empty for others."""
    return "" if entry.projected is None else f"{entry.projected[0]:,} of {entry.projected[2]:,}"


def _by_row(part: Part, entries: Sequence[Entry]) -> Grid:
    """The values of every row, and the result of every variant there."""
    names = list(dict.fromkeys(key for row in part.rows for key in row.values))
    shown_ = [
        variant
        for variant in part.variants
        if any(entry.variant == variant.name for entry in entries)
    ]
    targets = any(row.target is not None for row in part.rows)
    byte, size = unit_of(part, entries)
    rows: list[list[Cell | str]] = []
    for place, row in enumerate(part.rows):
        here = {entry.variant: entry for entry in entries if entry.row == place}
        values: list[Cell | str] = [_plain(row.values.get(name, "")) for name in names]
        values += [_plain(row.target)] if targets else []
        rows.append(
            [*values, *(_cell(part, here[v.name], size) if v.name in here else "" for v in shown_)]
        )
    extra = [f"{name_of(part.metric)} to reach"] if targets else []
    return Grid(
        [*names, *extra, *(f"{v.label}, {byte}" if targets else v.label for v in shown_)], rows
    )


def _cell(part: Part, entry: Entry, size: float) -> Cell:
    """The result of an entry, the settings it was tuned to, and the published number."""
    if part.rows[entry.row].target is not None:
        found = entry.reached
        return Cell(
            "not reached"
            if found is None
            else f"{found[1] / size:.3g} up, {found[2] / size:.3g} both ways"
        )
    verdict = judge(part, entry)
    published = " ".join(
        text for text in (SIGNS[verdict.holds], f"published {verdict.published}") if text
    )
    small = [point_of(entry)] if entry.tried else []
    small += (
        [", ".join(text for text in (published, verdict.distance) if text)]
        if verdict.published
        else []
    )
    mark = {True: "yes", False: "no", None: ""}[verdict.holds]
    return Cell(shown(part.metric, entry.final), "; ".join(small), mark)


def tuning(part: Part, entries: Sequence[Entry]) -> Grid:
    """One row per point of every grid."""
    rows: list[list[Cell | str]] = []
    for entry in entries:
        for one in entry.tried:
            words = ", ".join(f"{key} = {_plain(value)}" for key, value in one.point.items())
            mark = "chosen" if one.point == entry.point else "stopped early" if one.dropped else ""
            where = part.rows[entry.row].label
            rows.append(
                [
                    where,
                    entry.series.label,
                    words,
                    str(one.rounds),
                    shown(part.tune_metric, one.end),
                    mark,
                ]
            )
    return _without_empty(
        ["row", "method", "settings", "rounds", titled(part.tune_metric), ""], rows, title="Tuning"
    )


def records(part: Part, entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """One record of plain values per entry."""
    out = []
    for row in range(len(part.rows)):
        here = [entry for entry in entries if entry.row == row]
        fronts = {
            axis: reach([e.series for e in here], part.metric, part.goal, axis) for axis in PARETO
        }
        for place, entry in enumerate(here):
            curve = entry.series.curve(part.metric)
            last, verdict = curve.tail(1), judge(part, entry)
            record: dict[str, Any] = {
                "row": part.rows[row].label,
                "run": entry.series.label,
                "seeds": last.seeds,
            }
            record |= {
                "diverged": last.diverged,
                "failed": last.failed,
                "nan": last.undefined or None,
            }
            record |= {"rounds": int(curve.rounds[-1])}
            record |= {
                "last": last,
                "best": entry.best,
                "tuned": point_of(entry),
                "result": entry.final,
            }
            record |= {"up_bytes": int(curve.up[-1]), "down_bytes": int(curve.down[-1])}
            record |= {
                "client_state_bytes": entry.client_state,
                "client_memory_bytes": entry.client_memory,
            }
            record |= {"seconds": float(curve.seconds[-1])}
            record |= {f"pareto_{axis}_bytes": fronts[axis].get(place) for axis in PARETO}
            out.append(record | {"published": verdict.published, "reproduced": verdict.holds})
    return [
        {key: one[key] for key in one if any(r[key] not in (None, "") for r in out)} for one in out
    ]


def runs(part: Part, entries: Sequence[Entry]) -> Grid:
    """The runs of a part: last and best evaluation, what was sent, and where each is Pareto-optimal."""
    byte, size = unit_of(part, entries)
    header = ["row", "run", "seeds", "rounds", f"last {titled(part.metric)}", _best(part.metric)]
    header += [f"{byte} up", f"{byte} down", "client state, kB", MEMORY, "seconds"]
    header += [f"Pareto-optimal, {byte} up", f"Pareto-optimal, {byte} both ways"]
    rows: list[list[Cell | str]] = []
    for one in records(part, ranked(part, entries)):
        row = [one.get("row", ""), *(str(one[key]) for key in ("run", "seeds", "rounds"))]
        row += [shown(part.metric, one["last"]), shown(part.metric, one["best"])]
        row += [_scaled(one[key], size) for key in ("up_bytes", "down_bytes")]
        row += [
            _scaled(one.get("client_state_bytes"), 1e3),
            _scaled(one.get("client_memory_bytes"), 1e6),
        ]
        row += [
            f"{one['seconds']:.1f}".replace("nan", ""),
            *(_range(one.get(f"pareto_{axis}_bytes"), size) for axis in PARETO),
        ]
        rows.append([*row])
    return _without_empty(header, rows, title="Runs")


def results_csv(found: Sequence[dict[str, Any]]) -> str:
    """Records as CSV, numbers as they are: a result is its mean and its standard deviation over seeds."""
    lines = []
    for record in found:
        line: dict[str, Any] = {}
        for key, value in record.items():
            if isinstance(value, Tail):
                line |= {f"{key}_mean": _number(value.mean), f"{key}_sd": _number(value.spread)}
            elif key.startswith("pareto_"):
                low, high = (_number(end) for end in value or (math.nan, math.nan))
                line |= {f"{key}_from": low, f"{key}_to": high}
            else:
                line[key] = value
        lines.append(line)
    return csv_text(lines)


def curves_csv(series: Sequence[tuple[dict[str, str], Series]]) -> str:
    """The evaluations of every seed; each series comes with the columns that name it. Bytes are means over seeds."""
    lines = []
    for named, one in series:
        some = one.curve(next(iter(one.curves)))
        for place, seed in enumerate(one.seeds):
            for row, t in enumerate(some.rounds):
                values = {name: _number(one.curve(name).values[place, row]) for name in one.metrics}
                if any(values.values()):
                    costs: dict[str, Any] = {
                        "round": int(t),
                        "up_bytes": int(some.up[row]),
                        "down_bytes": int(some.down[row]),
                    }
                    costs |= {"seconds": float(some.seconds[row])}
                    lines.append(named | {"run": one.label, "seed": seed} | costs | values)
    return csv_text(lines)


def _number(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else ""


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _scaled(size: float | None, unit: float) -> str:
    return "" if size is None else f"{size / unit:.4g}"


def _range(ends: tuple[float, float] | None, unit: float) -> str:
    return "" if ends is None else " – ".join(f"{end / unit:.3g}" for end in dict.fromkeys(ends))


def _without_empty(
    header: list[str], rows: list[list[Cell | str]], keep: int = 0, title: str = ""
) -> Grid:
    """Without the columns that are empty, but for the first `keep`."""
    wanted = [n for n in range(len(header)) if n < keep or any(row[n] for row in rows)]
    return Grid([header[n] for n in wanted], [[row[n] for n in wanted] for row in rows], title)
