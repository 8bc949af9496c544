"""Published numbers against ours: whether a result reproduces, and whether claimed orders are seen."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

from fedspan.study.curves import Tail
from fedspan.study.model import Part, in_percent, name_of, settings
from fedspan.study.results import Entry, Results

SIGNS = {True: "✓", False: "✗", None: ""}


@dataclass(frozen=True)
class Verdict:
    """Our result against the published one."""

    holds: bool | None  # None: not judged
    published: str = ""  # as tables show it; empty: nothing was published
    distance: str = ""


def number(value: float, digits: int = 2) -> str:
    """6.23e-3, as tables show small numbers."""
    if not math.isfinite(value):
        return "NaN"
    mantissa, exponent = f"{value:.{digits}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def judge(part: Part, entry: Entry) -> Verdict:
    """Whether an entry reproduces what was published of it."""
    value = part.rows[entry.row].published.get(entry.variant)
    if value is None or isinstance(value, list):
        return Verdict(None)
    if isinstance(value, dict):
        return Verdict(entry.point == value if part.within else None, settings(value))
    text = number(float(value))
    return Verdict(None, text) if not part.within else compare(entry.final, value, part.within)


def compare(ours: Tail, value: Any, close: float) -> Verdict:
    """Whether a result lies within a relative distance of a published number; "nan" stands for a divergence."""
    text = number(float(value))
    if value == "nan":
        if ours.diverged == ours.seeds:
            return Verdict(True, text, "diverges, as published")
        return Verdict(False, text, f"{ours.diverged} of {ours.seeds} seeds diverged here")
    for word, count in ours.lost.items():
        return Verdict(False, text, f"{word} in {count} of {ours.seeds} seeds")
    change = ours.mean / float(value) - 1
    return Verdict(abs(change) <= close, text, f"{change * 100:+.0f} %")


def score(results: Results) -> tuple[dict[str, tuple[int, int]], list[str]]:
    """Label → (entries that reproduce, entries judged), over all parts; and those that do not reproduce, in words."""
    counts: dict[str, tuple[int, int]] = {}
    missed = []
    for part in results.study.parts:
        for entry in results.entries[part.name]:
            verdict = judge(part, entry)
            if verdict.holds is None or isinstance(
                part.rows[entry.row].published[entry.variant], dict
            ):
                continue
            label = entry.series.label
            good, total = counts.get(label, (0, 0))
            counts[label] = good + verdict.holds, total + 1
            if not verdict.holds:
                where = ", ".join(text for text in (label, part.rows[entry.row].label) if text)
                missed.append(f"{where}: published {verdict.published}; {verdict.distance}")
    return counts, list(dict.fromkeys(missed))


def score_line(results: Results) -> str:
    """How many published numbers each variant reproduces, in one line; empty if none is judged."""
    counts, _ = score(results)
    if not counts:
        return ""
    close = max(part.within for part in results.study.parts)
    texts = ", ".join(f"{label} {good} of {total}" for label, (good, total) in counts.items())
    return f"Published numbers that our results reproduce within {100 * close:.0f} %: {texts}."


def orders(part: Part, entries: list[Entry]) -> list[str]:
    """Each step of the claimed orders, in every row: whether it is seen, beyond the spread over seeds."""
    pairs = dict.fromkeys(pair for chain in part.claims for pair in itertools.pairwise(chain))
    out = []
    for number_, row in enumerate(part.rows):
        here = {entry.variant: entry for entry in entries if entry.row == number_}
        where = f"{row.label}: " if row.label else ""
        out += [where + _order(part, here[a], here[b]) for a, b in pairs if a in here and b in here]
    return out


def _order(part: Part, better: Entry, worse: Entry) -> str:
    points = in_percent(part.metric)
    unit, scale = ("points", 100.0) if points else (f"of {name_of(part.metric)}", 1.0)
    sign = 1 if part.goal == "max" else -1
    gap = scale * (better.final.mean - worse.final.mean)
    spread = scale * math.hypot(better.final.spread, worse.final.spread)
    if math.isnan(spread):
        word = "one seed"  # which has no spread, so there is no verdict
    elif sign * gap > spread:
        word = "holds"
    else:
        word = "reversed" if sign * gap < -spread else "within the spread"
    digits = ".1f" if points else ".2f" if abs(gap) >= 0.1 else ".1e"
    around = "" if math.isnan(spread) else f" ± {spread:{digits}}"
    labels = f"{better.series.label} {'>' if sign > 0 else '<'} {worse.series.label}"
    return f"{labels}: {word} ({gap:+{digits}}{around} {unit})"
