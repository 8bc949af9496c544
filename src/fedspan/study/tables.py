"""Tables of results: for the page and the terminal, as Markdown, and as CSV; with published numbers against ours."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fedspan.core import registry
from fedspan.core.files import csv_text
from fedspan.engine.history import HELD_OUT
from fedspan.study.budget import UNITS
from fedspan.study.curves import BYTES, Series, Tail, reach
from fedspan.study.model import Part, settings
from fedspan.study.results import Entry, Results

MEMORY = "client memory, MB"
MEMORY_NOTE = (
    "Client memory is the peak of one local step with the largest batch. It is computed by a dry run on tensors "
    "without data, as in `fedspan plan --model`; steps of FedIT and FFA-LoRA are those of PEFT's adapters. "
    "What a client keeps between rounds is not included."
)
NAMES = {  # what metrics are called in words, where their own name is none
    "loss": "test loss", "training_loss": "training loss", "rel_err": "relative error", "auroc": "AUROC",
    "c_index": "concordance index", "f1": "F1", "f1_macro": "macro F1", "mae": "mean absolute error",
    "mse": "mean squared error", "r2": "R²", "token_accuracy": "token accuracy",
    "average_precision": "average precision",
    "correction": "correction on", "correction_test": "test of the correction",
}  # fmt: skip


class TextCell(NamedTuple):
    """A text of a table; `small` stands below it, and `mark` colors that: yes, no or empty."""

    main: str
    small: str = ""
    mark: str = ""

    def __str__(self) -> str:
        return f"{self.main} ({self.small})" if self.small else self.main


@dataclass(frozen=True)
class TextTable:
    """A table; one with a title is folded away on the page."""

    header: list[str]
    rows: list[list[TextCell | str]]
    title: str = ""

    def texts(self) -> list[list[str]]:
        """The rows as plain text."""
        return [[str(cell) for cell in row] for row in self.rows]

    def markdown(self) -> str:
        """The table as Markdown."""
        lines = [self.header, ["---"] * len(self.header), *self.texts()]
        cells = ([text.replace("|", "\\|") for text in line] for line in lines)
        return "".join(f"| {' | '.join(line)} |\n" for line in cells)


# ---- numbers in words


def name_of(metric: str) -> str:
    """A metric in words."""
    plain = metric.removeprefix(HELD_OUT)
    if plain == metric:
        return NAMES.get(metric, metric)
    return f"validation {plain if plain == 'loss' else NAMES.get(plain, plain)}"


def in_percent(metric: str) -> bool:
    """Whether a metric is shown in percent."""
    return metric.removeprefix(HELD_OUT) in ("accuracy", "token_accuracy")


def scale_of(metric: str) -> int:
    """What a metric is multiplied by to be shown: accuracies are in percent."""
    return 100 if in_percent(metric) else 1


def titled(metric: str) -> str:
    """A metric in words with its unit."""
    return f"{name_of(metric)}, %" if in_percent(metric) else name_of(metric)


def number(value: float, digits: int = 2) -> str:
    """6.23e-3, as tables show small numbers."""
    if not math.isfinite(value):
        return "NaN"
    mantissa, exponent = f"{value:.{digits}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def shown(metric: str, tail: Tail) -> str:
    """A result in words: accuracies in percent, metrics of `fedspan.metrics` as they are, errors as 6.23e-3."""
    if in_percent(metric) or metric == "perplexity":
        scale = scale_of(metric)
        return tail.text(f"{scale * tail.mean:.1f}", f"{scale * tail.spread:.1f}")
    if metric.removeprefix(HELD_OUT) in registry.choices("metric"):
        return tail.text(f"{tail.mean:.4g}", f"{tail.spread:.2g}")
    return tail.text(number(tail.mean), number(tail.spread, 0))


def unit_of(part: Part, entries: Sequence[Entry]) -> tuple[str, float]:
    """The unit of bytes in the tables and on the axes of a part, and its size: that of the most that was sent."""
    sent = [float(one.series.curve(part.metric).spent("total")[-1]) for one in entries]
    most = max(sent, default=0.0)
    return next((one for one in reversed(UNITS.items()) if most >= one[1]), ("B", 1.0))


def point_of(entry: Entry) -> str:
    """The chosen settings of an entry; * marks the end of its grid."""
    found = [f"lr {entry.found_lr[0]:.3g} (searched)"] if entry.found_lr else []
    point = {key: value for key, value in entry.point.items() if not found or key != "method.lr"}
    return ", ".join([settings(point) + "*" * entry.at_edge] * bool(point) + found)


def _best(metric: str) -> str:
    """The heading of the best evaluation, which says where it was chosen on the test set."""
    name, unit = name_of(metric), ", %" if in_percent(metric) else ""
    said = metric == "rel_err" or name.startswith(("test ", "training ", "validation "))
    return f"best {name}{'' if said else ' on the test set'}{unit}"


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _scaled(size: float | None, unit: float) -> str:
    return "" if size is None else f"{size / unit:.4g}"


# ---- tables


def results(part: Part, entries: Sequence[Entry]) -> TextTable:
    """The main table of a part: one row per variant, or per row of the part with one column per variant."""
    return _by_variant(part, entries) if len(part.rows) == 1 else _by_row(part, entries)


def ranked(part: Part, entries: Sequence[Entry]) -> list[Entry]:
    """The entries from the best result to the worst; those without a result in every seed come last."""
    return sorted(
        entries, key=lambda one: -part.sign * one.final.mean if one.final.whole else math.inf
    )


def best_first(part: Part, series: Sequence[Series]) -> list[int]:
    """Numbers of the series from the best last value to the worst; those of which a seed is gone come last."""
    ends = [one.curve(part.metric).tail(1) for one in series]
    worth = [
        (not end.whole, -part.sign * (end.mean if math.isfinite(end.mean) else 0.0)) for end in ends
    ]
    return sorted(range(len(series)), key=lambda n: worth[n])


def _by_variant(part: Part, entries: Sequence[Entry]) -> TextTable:
    """The result, the best evaluation, results at equal cost, and what was spent; the best method first."""
    entries = ranked(part, entries)
    unit, (byte, size) = ", %" if in_percent(part.metric) else "", unit_of(part, entries)
    length = f"after {part.base['rounds']} rounds"
    if part.budget is not None:
        length = f"at {part.budget.words()}"
    header = ["method", "tuned", f"{name_of(part.metric)} {length}{unit}", _best(part.metric)]
    header += [*entries[0].at, *(["rounds"] if part.budget else [])]
    header += [f"{byte} up", f"{byte} both ways"]
    rows: list[list[TextCell | str]] = []
    for entry in entries:
        curve = entry.curve(part)
        texts = [shown(part.metric, tail) for tail in (entry.final, entry.best, *entry.at.values())]
        lengths = [f"{curve.rounds[-1]:.0f}"] if part.budget else []
        sizes = [f"{curve.spent(axis)[-1] / size:.4g}" for axis in BYTES]
        two = part.rows[0].published.get(entry.variant)
        published = [f"{value:.1f}" for value in two] if isinstance(two, list) else ["", ""]
        inside = entry.projected and f"{entry.projected[0]:,} of {entry.projected[2]:,}"
        last = [*published, _scaled(entry.client_memory, 1e6), inside or ""]
        rows.append([entry.series.label, point_of(entry), *texts, *lengths, *sizes, *last])
    more = ["published, final", "published, best", MEMORY, "projected parameters"]
    return _without_empty([*header, *more], rows, keep=len(header))


def _by_row(part: Part, entries: Sequence[Entry]) -> TextTable:
    """The values of every row, and the result of every variant there."""
    names = list(dict.fromkeys(key for row in part.rows for key in row.values))
    there = {entry.variant for entry in entries}
    variants = [variant for variant in part.variants if variant.name in there]
    targets = any(row.target is not None for row in part.rows)
    byte, size = unit_of(part, entries)
    header = [*names, *([f"{name_of(part.metric)} to reach"] if targets else [])]
    header += [f"{v.label}, {byte}" if targets else v.label for v in variants]
    rows: list[list[TextCell | str]] = []
    for place, row in enumerate(part.rows):
        here = {entry.variant: entry for entry in entries if entry.row == place}
        values: list[TextCell | str] = [_plain(row.values.get(name, "")) for name in names]
        values += [_plain(row.target)] if targets else []
        values += [_cell(part, here[v.name], size) if v.name in here else "" for v in variants]
        rows.append(values)
    return TextTable(header, rows)


def _cell(part: Part, entry: Entry, size: float) -> TextCell:
    """The result of an entry, the settings it was tuned to, and the published number."""
    if part.rows[entry.row].target is not None:
        if entry.reached is None:
            return TextCell("not reached")
        up, both = (value / size for value in entry.reached[1:])
        return TextCell(f"{up:.3g} up, {both:.3g} both ways")
    small = [point_of(entry)] if entry.tried else []
    judged = judge(part, entry)
    mark = {True: "yes", False: "no", None: ""}[judged.holds]
    if judged.published:
        sign = {"yes": "✓ ", "no": "✗ ", "": ""}[mark]
        words = [f"{sign}published {judged.published}", judged.distance]
        small.append(", ".join(filter(None, words)))
    return TextCell(shown(part.metric, entry.final), "; ".join(small), mark)


def tuning(part: Part, entries: Sequence[Entry]) -> TextTable:
    """One row per point of every grid."""
    rows: list[list[TextCell | str]] = []
    for entry in entries:
        for one in entry.tried:
            words = ", ".join(f"{key} = {_plain(value)}" for key, value in one.point.items())
            mark = "chosen" if one.point == entry.point else "stopped early" if one.dropped else ""
            end, where = shown(part.tune_metric, one.end), part.rows[entry.row].label
            rows.append([where, entry.series.label, words, str(one.rounds), end, mark])
    header = ["row", "method", "settings", "rounds", titled(part.tune_metric), ""]
    return _without_empty(header, rows, title="Tuning")


def runs(part: Part, entries: Sequence[Entry]) -> TextTable:
    """The runs of a part: last and best evaluation, what was sent, and where each is Pareto-optimal."""
    byte, size = unit_of(part, entries)
    header = ["row", "run", "seeds", "rounds", f"last {titled(part.metric)}", _best(part.metric)]
    header += [f"{byte} up", f"{byte} down", "client state, kB", MEMORY, "seconds"]
    header += [f"Pareto-optimal, {byte} up", f"Pareto-optimal, {byte} both ways"]
    rows: list[list[TextCell | str]] = []
    for one in records(part, ranked(part, entries)):
        row = [one.get("row", ""), *(str(one[key]) for key in ("run", "seeds", "rounds"))]
        row += [shown(part.metric, one["last"]), shown(part.metric, one["best"])]
        row += [_scaled(one[key], size) for key in ("up_bytes", "down_bytes")]
        row.append(_scaled(one.get("client_state_bytes"), 1e3))
        row.append(_scaled(one.get("client_memory_bytes"), 1e6))
        row.append(f"{one['seconds']:.1f}".replace("nan", ""))
        for axis in BYTES:
            ends = dict.fromkeys(one.get(f"pareto_{axis}_bytes") or ())
            row.append(" – ".join(f"{end / size:.3g}" for end in ends))
        rows.append([*row])
    return _without_empty(header, rows, title="Runs")


def _without_empty(
    header: list[str], rows: list[list[TextCell | str]], keep: int = 0, title: str = ""
) -> TextTable:
    """Without the columns that are empty, but for the first `keep`."""
    wanted = [n for n in range(len(header)) if n < keep or any(row[n] for row in rows)]
    return TextTable([header[n] for n in wanted], [[row[n] for n in wanted] for row in rows], title)


# ---- CSV


def records(part: Part, entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """One record of plain values per entry."""
    out: list[dict[str, Any]] = []
    for row in range(len(part.rows)):
        here = [entry for entry in entries if entry.row == row]
        series = [entry.series for entry in here]
        fronts = {axis: reach(series, part.metric, part.goal, axis) for axis in BYTES}
        for place, entry in enumerate(here):
            curve = entry.series.curve(part.metric)
            last, judged = curve.tail(1), judge(part, entry)
            record = {
                "row": part.rows[row].label,
                "run": entry.series.label,
                "seeds": last.seeds,
                "diverged": last.diverged,
                "failed": last.failed,
                "nan": last.undefined or None,
                "rounds": int(curve.rounds[-1]),
                "last": last,
                "best": entry.best,
                "tuned": point_of(entry),
                "result": entry.final,
                "up_bytes": int(curve.up[-1]),
                "down_bytes": int(curve.down[-1]),
                "client_state_bytes": entry.client_state,
                "client_memory_bytes": entry.client_memory,
                "seconds": float(curve.seconds[-1]),
            }
            record |= {f"pareto_{axis}_bytes": fronts[axis].get(place) for axis in BYTES}
            out.append(record | {"published": judged.published, "reproduced": judged.holds})
    known = {key for one in out for key, value in one.items() if value not in (None, "")}
    return [{key: value for key, value in one.items() if key in known} for one in out]


def results_csv(found: Sequence[dict[str, Any]]) -> str:
    """Records as CSV, numbers as they are: a result is its mean and its standard deviation over seeds."""
    lines = []
    for record in found:
        line: dict[str, Any] = {}
        for key, value in record.items():
            if isinstance(value, Tail):
                line |= {f"{key}_mean": _digits(value.mean), f"{key}_sd": _digits(value.spread)}
            elif key.startswith("pareto_"):
                low, high = (_digits(end) for end in value or (math.nan, math.nan))
                line |= {f"{key}_from": low, f"{key}_to": high}
            else:
                line[key] = value
        lines.append(line)
    return csv_text(lines)


def curves_csv(series: Sequence[tuple[dict[str, str], Series]]) -> str:
    """The evaluations of every seed; each series comes with the columns that name it. Bytes are means over seeds."""
    lines = []
    for named, one in series:
        some = next(iter(one.curves.values()))
        for place, seed in enumerate(one.seeds):
            for row, t in enumerate(some.rounds):
                values = {name: _digits(one.curve(name).values[place, row]) for name in one.metrics}
                if any(values.values()):
                    spent: dict[str, Any] = {"round": int(t), "up_bytes": int(some.up[row])}
                    spent |= {
                        "down_bytes": int(some.down[row]),
                        "seconds": float(some.seconds[row]),
                    }
                    lines.append(named | {"run": one.label, "seed": seed} | spent | values)
    return csv_text(lines)


def _digits(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else ""


# ---- published numbers


class Judged(NamedTuple):
    """Our result against the published one."""

    holds: bool | None  # None: not judged
    published: str = ""  # as tables show it; empty: nothing was published
    distance: str = ""


def judge(part: Part, entry: Entry) -> Judged:
    """Whether an entry reproduces what was published of it; "nan" stands for a divergence."""
    value, ours = part.rows[entry.row].published.get(entry.variant), entry.final
    if value is None or isinstance(value, list):
        return Judged(None)
    if isinstance(value, dict):
        return Judged(entry.point == value if part.within else None, settings(value))
    text = number(float(value))
    if not part.within:
        return Judged(None, text)
    if value == "nan":
        if ours.diverged == ours.seeds:
            return Judged(True, text, "diverges, as published")
        return Judged(False, text, f"{ours.diverged} of {ours.seeds} seeds diverged here")
    for word, count in ours.lost.items():
        return Judged(False, text, f"{word} in {count} of {ours.seeds} seeds")
    change = ours.mean / float(value) - 1
    return Judged(abs(change) <= part.within, text, f"{change * 100:+.0f} %")


def score(found: Results) -> tuple[str, list[str]]:
    """How many published numbers each variant reproduces, in one line, empty if none is judged; and those missed."""
    counts: dict[str, list[bool]] = {}
    missed = []
    for part in found.study.parts:
        for entry in found.entries[part.name]:
            judged, row = judge(part, entry), part.rows[entry.row]
            if judged.holds is None or isinstance(row.published[entry.variant], dict):
                continue
            label = entry.series.label
            counts.setdefault(label, []).append(judged.holds)
            if not judged.holds:
                where = ", ".join(text for text in (label, row.label) if text)
                missed.append(f"{where}: published {judged.published}; {judged.distance}")
    if not counts:
        return "", []
    close = max(part.within for part in found.study.parts)
    texts = ", ".join(f"{label} {sum(each)} of {len(each)}" for label, each in counts.items())
    line = f"Published numbers that our results reproduce within {100 * close:.0f} %: {texts}."
    return line, list(dict.fromkeys(missed))


def orders(part: Part, entries: Sequence[Entry]) -> list[str]:
    """Each step of the claimed orders, in every row: whether it is seen, beyond the spread over seeds."""
    pairs = dict.fromkeys(pair for chain in part.claims for pair in itertools.pairwise(chain))
    points = in_percent(part.metric)
    unit, scale = ("points", 100.0) if points else (f"of {name_of(part.metric)}", 1.0)
    out = []
    for (place, row), (a, b) in itertools.product(enumerate(part.rows), pairs):
        here = {entry.variant: entry for entry in entries if entry.row == place}
        if a not in here or b not in here:
            continue
        better, worse = here[a], here[b]
        gap = scale * (better.final.mean - worse.final.mean)
        spread = scale * math.hypot(better.final.spread, worse.final.spread)
        if math.isnan(spread):
            word = "one seed"  # which has no spread, so there is no verdict
        elif part.sign * gap > spread:
            word = "holds"
        else:
            word = "reversed" if part.sign * gap < -spread else "within the spread"
        digits = ".1f" if points else ".2f" if abs(gap) >= 0.1 else ".1e"
        around = "" if math.isnan(spread) else f" ± {spread:{digits}}"
        where = f"{row.label}: " if row.label else ""
        labels = f"{better.series.label} {'>' if part.sign > 0 else '<'} {worse.series.label}"
        out.append(f"{where}{labels}: {word} ({gap:+{digits}}{around} {unit})")
    return out
