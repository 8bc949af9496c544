"""Tables of a comparison, as (header, rows) for the page and the terminal, as Markdown, and as CSV."""

from __future__ import annotations

import csv
import io
import math

from fedspan.compare.curves import Tail
from fedspan.compare.outcome import Outcome
from fedspan.compare.plan import Variant

Cells = tuple[list[str], list[list[str]]]


def number(value: float, digits: int = 2) -> str:
    """6.23e-3, the way the tables write it."""
    if not math.isfinite(value):
        return "NaN"
    mantissa, exponent = f"{value:.{digits}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def shown(outcome: Outcome, tail: Tail) -> str:
    """A result in words: accuracies in per cent, other metrics as 6.23e-3."""
    if outcome.comparison.metric == "accuracy":
        return tail.text(f"{100 * tail.mean:.1f}", f"{100 * tail.spread:.1f}")
    return tail.text(number(tail.mean), number(tail.spread, 0))


def point_of(outcome: Outcome, variant: Variant) -> str:
    """The chosen settings of a variant; * marks the edge of its grid."""
    point = outcome.chosen()[variant.name]
    star = "*" if outcome.at_edge(variant) else ""
    return ", ".join(f"{key.rpartition('.')[2]} {value:g}" for key, value in point.items()) + star


def main(outcome: Outcome) -> Cells:
    """One row a variant: result at equal rounds, at equal uplink, at equal total bytes, and what it spent."""
    plan = outcome.comparison
    up, both = outcome.budget("up"), outcome.budget("bytes")
    unit = ", %" if plan.metric == "accuracy" else ""
    header = ["method", "tuned", f"{plan.metric} after {plan.base['rounds']} rounds{unit}", f"best{unit}"]
    header += [f"at {up / 1e6:.3g} MB up", f"at {both / 1e6:.3g} MB both ways", "MB up", "MB both ways"]
    rows = []
    for variant in plan.variants:
        curve = outcome.curve(variant)
        results = [outcome.final(variant), outcome.best(variant)]
        results += [outcome.at(variant, "up", up), outcome.at(variant, "bytes", both)]
        sizes = [curve.up[-1], curve.up[-1] + curve.down[-1]]
        texts = [shown(outcome, tail) for tail in results]
        rows.append([variant.label, point_of(outcome, variant), *texts, *(f"{s / 1e6:.1f}" for s in sizes)])
    return header, rows


def tuning(outcome: Outcome) -> Cells:
    """One row a point of every grid."""
    plan = outcome.comparison
    chosen = outcome.chosen()
    header = ["method", "settings", f"{plan.metric} after {plan.horizon} rounds", ""]
    rows = []
    for variant in plan.variants:
        for trial in outcome.trials(variant):
            settings = ", ".join(f"{key} = {value:g}" for key, value in trial.point.items())
            mark = "chosen" if trial.point == chosen[variant.name] else ""
            rows.append([variant.label, settings, shown(outcome, trial.end), mark])
    return header, rows


def markdown(cells: Cells) -> str:
    """A table as Markdown."""
    header, rows = cells
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *rows)) + "\n"


def curves_csv(outcome: Outcome) -> str:
    """Every evaluation of every seed."""
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(["variant", "seed", "round", "up_bytes", "both_bytes", outcome.comparison.metric])
    for variant in outcome.comparison.variants:
        curve = outcome.curve(variant)
        for seed, values in enumerate(curve.values):
            spent = zip(curve.rounds, curve.up, curve.up + curve.down, values, strict=True)
            for t, up, both, value in spent:
                if not math.isnan(value):
                    table.writerow([variant.name, seed, int(t), int(up), int(both), f"{value:.6g}"])
    return out.getvalue()
