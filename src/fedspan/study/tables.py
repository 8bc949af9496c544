"""Tables of results, made once as texts, and their records as values: Markdown, CSV, page and terminal show these.

Published numbers are judged here as well: which ones our results reproduce, and which claimed orders are seen.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from fedspan.core import registry
from fedspan.engine.history import HELD_OUT
from fedspan.study.budget import UNITS
from fedspan.study.curves import BYTES, Series, Tail, plain, reach
from fedspan.study.model import Part, settings
from fedspan.study.results import Entries, Entry, Results, by_row

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
    "correction": "correction on", "correction_test": "test of the correction",
}  # fmt: skip


class TextCell(NamedTuple):
    """A text of a table; `small` stands below it, and `mark` colors that: yes, no or empty."""

    main: str
    small: str = ""
    mark: str = ""

    def __str__(self) -> str:
        return f"{self.main} ({self.small})" if self.small else self.main


Record = dict[str, Any]
Rows = list[list[TextCell | str]]


@dataclass(frozen=True)
class TextTable:
    """A table; one with a title is folded away on the page."""

    header: list[str]
    rows: Rows
    title: str = ""

    def texts(self) -> list[list[str]]:
        """Return the rows as plain text."""
        return [[str(cell) for cell in row] for row in self.rows]

    def markdown(self) -> str:
        """Return the table as Markdown."""
        lines = [self.header, ["---"] * len(self.header), *self.texts()]
        cells = ([text.replace("|", "\\|") for text in line] for line in lines)
        return "".join(f"| {' | '.join(line)} |\n" for line in cells)


# ---- numbers in words


def name_of(metric: str) -> str:
    """Return a metric in words."""
    plain = metric.removeprefix(HELD_OUT)
    if plain == metric:
        return NAMES.get(metric, metric)
    return f"validation {plain if plain == 'loss' else NAMES.get(plain, plain)}"


def scale_of(metric: str) -> int:
    """Return what a metric is multiplied by to be shown: accuracies are in percent."""
    return 100 if metric.removeprefix(HELD_OUT) in ("accuracy", "token_accuracy") else 1


def titled(metric: str, name: str = "") -> str:
    """Return a metric, or what `name` says of it, with its unit."""
    return f"{name or name_of(metric)}{', %' if scale_of(metric) == 100 else ''}"


def number(value: float, digits: int = 2) -> str:
    """Return 6.23e-3, as tables show small numbers."""
    if not math.isfinite(value):
        return "NaN"
    mantissa, exponent = f"{value:.{digits}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def shown(metric: str, tail: Tail) -> str:
    """Return a result in words: accuracies in percent, known metrics as they are, errors as 6.23e-3."""
    if (scale := scale_of(metric)) == 100 or metric == "perplexity":
        return tail.text(f"{scale * tail.mean:.1f}", f"{scale * tail.spread:.1f}")
    if metric.removeprefix(HELD_OUT) in registry.choices("metric"):
        return tail.text(f"{tail.mean:.4g}", f"{tail.spread:.2g}")
    return tail.text(number(tail.mean), number(tail.spread, 0))


def unit_of(entries: Entries) -> tuple[str, float]:
    """Return the unit of bytes of some entries, and its size: that of the most that was sent."""
    sent = [float(one.series.spent["total"][-1]) for one in entries]
    most = max(sent, default=0.0)
    return next((one for one in reversed(UNITS.items()) if most >= one[1]), ("B", 1.0))


def point_of(entry: Entry) -> str:
    """Return the chosen settings of an entry; * marks the end of its grid."""
    point, words = dict(entry.point), []
    if entry.found_lr:
        point.pop("method.lr", None)
        words = [f"lr {entry.found_lr[0]:.3g} (searched)"]
    if point:
        words.insert(0, settings(point) + "*" * entry.at_edge)
    return ", ".join(words)


def at_cost(part: Part) -> str:
    """Return where results are read, in words."""
    return f"at {part.budget.words()}" if part.budget else f"after {part.base['rounds']} rounds"


def _best(metric: str) -> str:
    """Return the heading of the best evaluation, which says where it was chosen on the test set."""
    name = name_of(metric)
    said = metric == "rel_err" or name.startswith(("test ", "training ", "validation "))
    return titled(metric, f"best {name}{'' if said else ' on the test set'}")


# ---- records: what is known of every entry


def ranked(part: Part, entries: Entries) -> list[Entry]:
    """Return the entries from the best result to the worst; those without one in every seed come last."""

    def worth(one: Entry) -> float:
        return part.sign * one.final.mean if one.final.whole else -math.inf

    return sorted(entries, key=worth, reverse=True)


def rows(part: Part, entries: Entries) -> list[Record]:
    """Return one record of numbers per entry: its result over seeds, its settings, and what was spent for it."""
    found = []
    for entry in entries:
        spent = {axis: values[-1] for axis, values in entry.curve(part).spent.items()}
        result = entry.final
        found.append(
            {
                "method": entry.label,
                part.metric: result.mean,
                f"{part.metric}_sd": result.spread,
                f"best_{part.metric}": entry.best.mean,
                **entry.settings,
                "at_edge": entry.at_edge,
                "rounds": int(spent["round"]),
                "up_bytes": int(spent["up"]),
                "down_bytes": int(spent["down"]),
                "client_state_bytes": entry.client_state,
                "client_memory_bytes": entry.client_memory,
                "seconds": float(spent["seconds"]),
                "seeds": result.seeds,
                "diverged": result.diverged,
                "failed": result.failed,
                "nan": result.undefined,
            }
        )
    return found


def records(part: Part, entries: Entries) -> list[Record]:
    """Return what the tables show of every entry. Keys that begin with "result" count what the budget allows."""
    out = []
    for row, here in by_row(part, entries):
        series = [entry.series for entry in here]
        fronts = {axis: reach(series, part.metric, part.goal, axis) for axis in BYTES}
        for place, entry in enumerate(here):
            curve, spent = entry.series.curve(part.metric), entry.curve(part).spent
            last = curve.tail(1)
            record: Record = {
                "row": row.label,
                "run": entry.label,
                "seeds": last.seeds,
                "rounds": int(curve.rounds[-1]),
                "last": last,
                "best": entry.best,
                "tuned": point_of(entry),
                "result": entry.final,
                **entry.at,
                **_costs(curve, -1),
                "client_state_bytes": entry.client_state,
                "client_memory_bytes": entry.client_memory,
                **{f"pareto_{axis}_bytes": fronts[axis].get(place) for axis in BYTES},
                **{f"result_{axis}_bytes": float(spent[axis][-1]) for axis in BYTES},
            }
            if part.budget is not None:
                record["result_rounds"] = int(spent["round"][-1])
            pair = row.published.get(entry.variant)
            if isinstance(pair, list):
                record |= zip(("published_final", "published_best"), pair, strict=True)
            if entry.projected:
                record["projected"] = f"{entry.projected[0]:,} of {entry.projected[2]:,}"
            out.append(record)
    return out


def _costs(one: Series, row: int) -> Record:
    """Return what was spent up to a row; hours are those of a virtual clock, if there is one."""
    spent = {key: float(values[row]) for key, values in one.spent.items()}
    found: Record = {f"{way}_bytes": int(spent[way]) for way in ("up", "down")}
    return found | {key: spent[key] for key in ("seconds", "hours") if math.isfinite(spent[key])}


# ---- tables


def results(part: Part, entries: Entries) -> TextTable:
    """Return the main table of a part: one row per variant, or per row of the part with one column per variant."""
    return _by_row(part, entries) if len(part.rows) > 1 else _by_variant(part, entries)


def _by_variant(part: Part, entries: Entries) -> TextTable:
    """Return the result, the best evaluation, results at equal cost, and what was spent; the best method first."""
    first = {
        "method": "run",
        "tuned": "tuned",
        titled(part.metric, f"{name_of(part.metric)} {at_cost(part)}"): "result",
        _best(part.metric): "best",
        **{heading: heading for heading in entries[0].at},
        **({"rounds": "result_rounds"} if part.budget else {}),
        "{} up": "result_up_bytes",
        "{} both ways": "result_total_bytes",
    }
    more = {
        "published, final": "published_final",
        "published, best": "published_best",
        MEMORY: "client_memory_bytes",
        "projected parameters": "projected",
    }
    return _of_records(part, entries, first | more, keep=len(first))


def runs(part: Part, entries: Entries) -> TextTable:
    """Return the runs of a part: last and best evaluation, what was sent, and where each is Pareto-optimal."""
    columns = {
        "row": "row",
        "run": "run",
        "seeds": "seeds",
        "rounds": "rounds",
        f"last {titled(part.metric)}": "last",
        _best(part.metric): "best",
        "{} up": "up_bytes",
        "{} down": "down_bytes",
        "client state, kB": "client_state_bytes",
        MEMORY: "client_memory_bytes",
        "seconds": "seconds",
        "hours": "hours",
        "Pareto-optimal, {} up": "pareto_up_bytes",
        "Pareto-optimal, {} both ways": "pareto_total_bytes",
    }
    return _of_records(part, entries, columns, title="Runs")


def _of_records(
    part: Part, entries: Entries, columns: dict[str, str], keep: int = 0, title: str = ""
) -> TextTable:
    """Return a table with a row per entry and a column per heading → key of a record; {} is the unit of bytes."""
    unit, size = unit_of(entries)
    sizes = {"client_state_bytes": 1e3, "client_memory_bytes": 1e6}

    def text(key: str, value: Any) -> str:
        if isinstance(value, Tail):
            return shown(part.metric, value)
        if isinstance(value, tuple):
            return " – ".join(f"{end / size:.3g}" for end in dict.fromkeys(value))
        if value is not None and key.endswith("_bytes"):
            return f"{value / sizes.get(key, size):.4g}"
        if isinstance(value, float):
            return f"{value:.3g}" if key == "hours" else f"{value:.1f}"
        return "" if value is None else str(value)

    found = records(part, ranked(part, entries))
    lines: Rows = [[text(key, one.get(key)) for key in columns.values()] for one in found]
    return _full([heading.replace("{}", unit) for heading in columns], lines, keep, title)


def _full(header: list[str], rows: Rows, keep: int = 0, title: str = "") -> TextTable:
    """Return a table without the columns that are empty, but for the first `keep`."""
    wanted = [n for n in range(len(header)) if n < keep or any(row[n] for row in rows)]
    return TextTable([header[n] for n in wanted], [[row[n] for n in wanted] for row in rows], title)


def _by_row(part: Part, entries: Entries) -> TextTable:
    """Return the values of every row, and the result of every variant there."""
    unit, size = unit_of(entries)
    names = dict.fromkeys(key for row in part.rows for key in row.values)
    there = {entry.variant for entry in entries}
    variants = [variant for variant in part.variants if variant.name in there]
    targets = any(row.target is not None for row in part.rows)
    header = [*names, *[f"{name_of(part.metric)} to reach"] * targets]
    header += [f"{one.label}, {unit}" if targets else one.label for one in variants]
    rows: Rows = []
    for row, found in by_row(part, entries):
        here = {one.variant: _cell(part, one, size) for one in found}
        values = [plain(row.values.get(name, "")) for name in names] + [plain(row.target)] * targets
        rows.append([*values, *(here.get(one.name, "") for one in variants)])
    return TextTable(header, rows)


def _cell(part: Part, entry: Entry, size: float) -> TextCell:
    """Return the result of an entry, the settings it was tuned to, and the published number."""
    if part.rows[entry.row].target is not None:
        if entry.reached is None:
            return TextCell("not reached")
        up, both = (value / size for value in entry.reached[1:])
        return TextCell(f"{up:.3g} up, {both:.3g} both ways")
    small = [point_of(entry)] if entry.tried else []
    holds, published, distance = judge(part, entry)
    mark, sign = {True: ("yes", "✓ "), False: ("no", "✗ "), None: ("", "")}[holds]
    if published:
        small.append(f"{sign}published {published}{', ' * bool(distance)}{distance}")
    return TextCell(shown(part.metric, entry.final), "; ".join(small), mark)


def tuning(part: Part, entries: Entries) -> TextTable:
    """Return one row per point of every grid."""
    rows: Rows = []
    for entry in entries:
        for one in entry.tried:
            words = ", ".join(f"{key} = {plain(value)}" for key, value in one.point.items())
            mark = "chosen" if one.point == entry.point else "stopped early" if one.dropped else ""
            end, where = shown(part.tune_metric, one.end), part.rows[entry.row].label
            rows.append([where, entry.label, words, str(one.rounds), end, mark])
    header = ["row", "method", "settings", "rounds", titled(part.tune_metric), ""]
    return _full(header, rows, title="Tuning")


# ---- published numbers


def judge(part: Part, entry: Entry) -> tuple[bool | None, str, str]:
    """Return whether an entry reproduces what was published of it, that in words, and the distance.

    None: it is not judged. "nan" stands for a divergence.
    """
    value, ours = part.rows[entry.row].published.get(entry.variant), entry.final
    if value is None or isinstance(value, list):
        return None, "", ""
    if isinstance(value, dict):
        return (entry.point == value if part.within else None), settings(value), ""
    mean, _, spread = str(value).partition("±")
    goal = Tail(float(mean), float(spread or "nan"), 0, 1)
    text, scale = shown(part.metric, goal), scale_of(part.metric)
    if part.distance == "absolute":  # with its own digits
        text = goal.text(f"{scale * goal.mean:.4g}", f"{scale * goal.spread:.4g}")
    if not part.within:
        return None, text, ""
    if math.isnan(goal.mean):
        gone = ours.diverged == ours.seeds
        ends = f"{ours.diverged} of {ours.seeds} seeds diverged here"
        return gone, text, "diverges, as published" if gone else ends
    for word, count in ours.lost.items():
        return False, text, f"{word} in {count} of {ours.seeds} seeds"
    if part.distance == "absolute":
        gap = ours.mean - goal.mean
        words = f"{scale * gap:+.2f} points" if scale == 100 else f"{gap:+.3f}"
        return abs(gap) <= part.within, text, words
    ratio = ours.mean / goal.mean
    if part.distance == "decades":
        close = ours.mean > 0 and abs(math.log10(ratio)) <= part.within
        return close, text, f"× {ratio:.2g}"
    return abs(ratio - 1) <= part.within, text, f"{(ratio - 1) * 100:+.0f} %"


def published(part: Part, entries: Entries) -> TextTable:
    """Return one row per published number, with ours and the verdict in words; no rows where there are none."""
    scale = scale_of(part.metric)
    units = {
        "relative": f"{100 * part.within:g} %",
        "absolute": f"{scale * part.within:g}{' points' if scale == 100 else ''}",
        "decades": f"a factor of {10**part.within:.2g}",
    }
    rows: Rows = []
    for entry in entries:
        holds, text, distance = judge(part, entry)
        if text:
            label, ours = part.rows[entry.row].label, shown(part.metric, entry.final)
            said = {True: "met", False: "not met", None: "not judged"}[holds]
            rows.append([label, entry.label, text, ours, distance, said])
    verdict = f"verdict (within {units[part.distance]})" if part.within else "verdict"
    return _full(["row", "method", "published", "ours", "apart", verdict], rows)


def score(found: Results) -> str:
    """Return how many published numbers each variant reproduces; empty if none is judged."""
    counts: dict[str, list[bool]] = {}
    for part in found.study.parts:
        for entry in found.entries[part.name]:
            holds, *_ = judge(part, entry)
            point = isinstance(part.rows[entry.row].published.get(entry.variant), dict)
            if holds is not None and not point:
                counts.setdefault(entry.label, []).append(holds)
    if not counts:
        return ""
    parts = [part for part in found.study.parts if part.within]
    close = f" within {100 * max(part.within for part in parts):.0f} %"
    if any(part.distance != "relative" for part in parts):  # the tables of the parts say how close
        close = ""
    texts = ", ".join(f"{label} {sum(each)} of {len(each)}" for label, each in counts.items())
    return f"Published numbers that our results reproduce{close}: {texts}."


def orders(part: Part, entries: Entries) -> list[str]:
    """Return each step of the claimed orders, in every row: whether it is seen, beyond the spread over seeds."""
    pairs = dict.fromkeys(pair for chain in part.claims for pair in itertools.pairwise(chain))
    scale, out = scale_of(part.metric), []
    unit = "points" if scale == 100 else f"of {name_of(part.metric)}"
    for (row, found), pair in itertools.product(by_row(part, entries), pairs):
        here = {entry.variant: entry for entry in found}
        if not here.keys() >= set(pair):
            continue
        better, worse = (here[name] for name in pair)
        gap = scale * (better.final.mean - worse.final.mean)
        spread = scale * math.hypot(better.final.spread, worse.final.spread)
        digits = ".1f" if scale == 100 else ".2f" if abs(gap) >= 0.1 else ".1e"
        around = f" ± {spread:{digits}}"
        if math.isnan(spread):
            word, around = "one seed", ""  # which has no spread, so there is no verdict
        elif abs(gap) <= spread:
            word = "within the spread"
        else:
            word = "holds" if part.sign * gap > 0 else "reversed"
        where, sign = f"{row.label}: " if row.label else "", ">" if part.sign > 0 else "<"
        labels = f"{better.label} {sign} {worse.label}"
        out.append(f"{where}{labels}: {word} ({gap:+{digits}}{around} {unit})")
    return out
