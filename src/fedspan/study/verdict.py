"""What a comparison says, in words: which method to take, by how much, and whether the seeds support it.

Methods run under the same seeds, so two of them are compared by the differences of their results per seed. The seeds
support a difference if the 95 % interval of its mean (Student's t) does not contain zero: of two methods that are equal
one is then taken in 5 % of all comparisons. An accuracy is a multiple of one over the number of test examples, and the
variance of this rounding counts in the interval: seeds that agree by it alone would support anything. The interval is
about other seeds on the same test set; how far another test set would move an accuracy is said apart.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedspan.callbacks.training_loss import NAME as TRAIN_LOSS
from fedspan.core.errors import one_line
from fedspan.engine.history import HELD_OUT
from fedspan.study.budget import sized
from fedspan.study.curves import Floats, Table
from fedspan.study.model import Part, settings
from fedspan.study.results import Entries, Entry, by_row
from fedspan.study.tables import at_cost, name_of, ranked, scale_of, shown
from fedspan.study.tuning import edges

# 97.5 % quantiles of Student's t for 1, 2, … degrees of freedom; the last one serves for all that follow.
STUDENT = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
EQUAL = 1e-5  # a relative difference of two results that rounding over a run can make
CHEAPER = 0.9  # of methods that are equally good, one that sends less than this share of the most is mentioned
LONG = 150  # characters of a reason
CLOSE = 0.8  # a result that is read at less than this share of its budget is mentioned
LITTLE = 0.9  # a method that sends this share of a model's parameters or more has little to gain
FEW = 5  # methods that a title names
DATA = {
    "mnist": "MNIST",
    "fashion_mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
}


def said(part: Part, entries: Entries) -> list[str]:
    """Return one sentence per question: which method, and what to know about that answer."""
    if len(part.rows) > 1 or not entries:
        return _best_by_row(part, entries)
    questions = (_choice, _noise, _edge, _lost, _little_to_gain, _how)
    return [text for about in questions if (text := about(part, entries))]


def _best_by_row(part: Part, entries: Entries) -> list[str]:
    """Return which methods have the best mean in how many rows; nothing where rows compare costs or one method."""
    winners = Counter[str]()
    for row, found in by_row(part, entries):
        here = [one for one in found if one.final.whole]
        if len(here) > 1 and row.target is None:
            winners[ranked(part, here)[0].label] += 1
    if not winners:
        return []
    rows, counts = winners.total(), winners.most_common()
    text = f"{_listed([f'{label} in {count}' for label, count in counts])} of {rows}"
    if len(counts) == 1:
        text = f"{counts[0][0]} in all {rows}"
    return [f"{_most(part).capitalize()} mean {name_of(part.metric)}: {text} rows."]


def _most(part: Part) -> str:
    return "highest" if part.goal == "max" else "lowest"


def _choice(part: Part, entries: Entries) -> str:
    """Return which method to take."""
    whole = [one for one in ranked(part, entries) if one.final.whole]
    if not whole:
        return "No method has a result in every seed."
    best, *others = whole
    where = f" {at_cost(part)}"
    label, seeds, scale = best.label, len(best.ends), scale_of(part.metric)
    value = f"{name_of(part.metric)} {_value(part, best)}"
    names = [f"{one.label} ({_value(part, one)})" for one in others]
    if not others:
        return f"{label}{where}: {value}{f' over {seeds} seeds' if seeds > 1 else ''}."
    if not np.isfinite([*best.ends, *others[0].ends]).all():  # only means were kept
        return f"{label} has the {_most(part)} mean{where}: {value}; next is {names[0]}."
    if seeds == 1 and best.final.mean == others[0].final.mean:
        return f"In one seed {label} and {others[0].label} end equal{where}: {value}."
    gaps = [part.sign * _gaps(best, one) for one in others]
    apart = [told_apart(part, best, one) for one in others]
    sure = [told or bool((gap > 0).all()) for told, gap in zip(apart, gaps, strict=True)]
    if not sure[0]:
        mixed = [*sure, True].index(True)
        text = f"The {seeds} seeds do not tell {label} ({value}) apart from {_listed(names[:mixed])}{where}"
        sent = [float(one.curve(part).spent["total"][-1]) for one in whole[: mixed + 1]]
        least = min(sent)
        if least < CHEAPER * max(sent):
            cheap = whole[sent.index(least)].label
            text += f"; of these, {cheap} sends least in both directions, {sized(least)}"
        return f"{text}."
    digits, unit = (".1f", " points") if scale == 100 else (".2g", "")
    gap = f"{scale * abs(best.final.mean - others[0].final.mean):{digits}}{unit}"
    ahead = f"{value}, {gap} {'higher' if part.goal == 'max' else 'lower'} than {names[0]}"
    if not apart[0]:
        spread = "in one seed"
        if seeds > 1:
            mean, half = float(gaps[0].mean()), _half(part, best, gaps[0])
            ends = " to ".join(f"{scale * end:{digits}}" for end in (mean - half, mean + half))
            spread = f"in each of the {seeds} seeds, but the 95 % interval of the difference, {ends}{unit}, "
            spread += "contains zero"
        return f"{label} is ahead{where}: {ahead} {spread.replace('-', '−')}."
    noisy = [name for name, told in zip(names, apart, strict=True) if not told]
    but = f" (less so against {_listed(noisy)}: results spread widely there)" if noisy else ""
    return f"Take {label}{where}: {ahead}; the {seeds} seeds support it{but}."


def told_apart(part: Part, one: Entry, other: Entry) -> bool:
    """Return whether the seeds support that two results differ."""
    gaps = _gaps(one, other)
    return len(gaps) > 1 and abs(float(gaps.mean())) > _half(part, one, gaps)


def _half(part: Part, one: Entry, gaps: Floats) -> float:
    """Return half of the 95 % interval of a mean difference."""
    rounding = 0.0
    if part.metric == "accuracy" and one.test_examples is not None:
        rounding = 1 / (6 * one.test_examples**2)  # of two multiples of 1/n: 2 (1/n)²/12
    deviation = math.sqrt(float(gaps.var(ddof=1)) + rounding)
    return STUDENT[min(len(gaps) - 1, len(STUDENT)) - 1] * deviation / math.sqrt(len(gaps))


def _gaps(one: Entry, other: Entry) -> Floats:
    """Return the differences of two results, per seed; 0 for those of rounding."""
    mine, others = np.array(one.ends), np.array(other.ends)
    return np.where(np.isclose(mine, others, rtol=EQUAL, atol=0.0), 0.0, mine - others)


def _value(part: Part, entry: Entry) -> str:
    mean = entry.final.mean
    return f"{100 * mean:.1f} %" if scale_of(part.metric) == 100 else f"{mean:.3g}"


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _noise(part: Part, entries: Entries) -> str:
    """Return what the intervals over seeds leave out."""
    means = [one.final.mean for one in entries if one.final.whole]
    sizes = {one.test_examples for one in entries if one.test_examples is not None}
    if len(means) < 2 or len(sizes) != 1 or part.metric.startswith(HELD_OUT):
        return ""
    (count,) = sizes
    start = f"This is over seeds, all measured on the same {count:,} test examples"
    if part.metric != "accuracy":
        return f"{start}, whose choice the seeds do not show."
    p = min(max(means), 1 - 1 / count)
    half = 196 * math.sqrt(max(p * (1 - p), 0) / count)  # of the 95 % interval, in points
    return f"{start}: another test set of that size would move the best accuracy by about ± {half:.1f} points."


def _edge(part: Part, entries: Entries) -> str:
    """Return which best settings lie at an end of their grid."""
    found = [
        f"{one.label} ({settings(at_end)})"
        for one in entries
        if (at_end := edges(part.variant(one.variant), one.point))
    ]
    if not found:
        return ""
    verb = "are best at the ends of their grids"
    if len(found) == 1:
        verb = "is best at the end of its grid"
    return f"{_listed(found)} {verb}: a better value may lie beyond."


def _lost(part: Part, entries: Entries) -> str:
    """Return which methods have no result, or one far below the budget."""
    found = []
    for one in entries:
        label, seeds = one.label, one.final.seeds
        for word, count in one.final.lost.items():
            what = word if word != "NaN" else f"has no number as {name_of(part.metric)}"
            what += f" in {count} of {seeds} seeds" if seeds > 1 else ""
            if word == "failed" and one.failures:
                what += f" ({one_line(one.failures[0].partition(': ')[2], LONG)})"
            found.append(f"{label} {what}")
        if one.final.whole and part.budget is not None:
            spent, limits = one.curve(part).spent, part.budget.limits
            share = max(float(spent[axis][-1]) / most for axis, most in limits.items())
            if share < CLOSE:
                found.append(
                    f"{label} is read at {100 * share:.0f} % of the budget, where its last evaluation is"
                )
    return f"{'; '.join(found)}." if found else ""


def _little_to_gain(_part: Part, entries: Entries) -> str:
    """Return which methods of a subspace send almost all parameters."""
    found = []
    for one in entries:
        if one.projected is None or "compressor" in one.series.spec["method"].get("uplink", {}):
            continue
        projected, sent, parameters = one.projected
        if not projected or sent >= LITTLE * parameters:
            share, gain = (f"{projected:,}", "little") if projected else ("none", "nothing")
            found.append(
                f"{one.label} projects {share} of the {parameters:,} parameters and has {gain} to gain"
            )
    if not found:
        return ""
    return f"{'; '.join(found)}: biases, small tensors and the output head are sent in full."


def _how(part: Part, entries: Entries) -> str:
    """Return by what the settings were chosen; or that methods run with one step size, which may not suit all."""
    if any(one.tried for one in entries):
        same = ", the metric of the results"
        if part.tune_metric != part.metric:
            same = ", not by the test set"
        by = _judge(part.tune_metric)
        return f"Settings were chosen by {by} on the {_first_seeds(part)}{same}."
    if any(one.found_lr for one in entries):
        held_out = part.tune_metric.startswith(HELD_OUT)
        by = "the validation loss" if held_out else _judge(part.tune_metric)
        return f"Step sizes were searched by {by}."
    rates = [one.series.spec["method"].get("lr") for one in entries]
    given = isinstance(rates[0], float | int) and rates.count(rates[0]) == len(rates) > 1
    if not given or part.name != "comparison":  # parts of a study are made as they are on purpose
        return ""
    return (
        f"Not tuned: every method runs with the lr that is given, {rates[0]:g}; give --grid or --set method.lr=search, "
        "in Python `tune`."
    )


def _judge(metric: str) -> str:
    return "the training loss" if metric == TRAIN_LOSS else name_of(metric)


def _first_seeds(part: Part) -> str:
    return f"first {part.tuning_seeds} seeds" if part.tuning_seeds > 1 else "first seed"


# ---- titles, how a comparison was made, and how far runs have come


def title_of(labels: Sequence[str], task: Table) -> str:
    """Return what is compared on what; many methods are counted."""
    methods = _listed(labels) if len(labels) <= FEW else f"{len(labels)} methods"
    return f"{methods} on {problem(task)}"


def problem(task: Table) -> str:
    """Return a task in words: its data, or what kind of problem it is, and the number of clients."""
    name, data, het = str(task.get("name", "")), task.get("data"), task.get("het")
    what = {"regression": "the regression problem", "custom": ""}.get(name, name)
    if isinstance(data, str) and name != "custom":  # of a custom task it is a digest
        what = DATA.get(data, Path(data).stem)
    partition = task.get("partition", {})
    inside = partition.get("clients") if isinstance(partition, dict) else None
    count = task.get("clients") or inside
    words = [
        what,
        f"het {het:g}" if isinstance(het, int | float) else "",
        f"{count} clients" if count else "",
    ]
    return ", ".join(filter(None, words)) or "your own model and data"


def described(part: Part, entries: Entries = ()) -> str:
    """Return how a comparison was made."""
    tuned = any(len(variant.points()) > 1 for variant in part.variants)
    parts = ["One seed."]
    if part.seeds > 1:
        parts = [
            f"Every method runs under {part.seeds} seeds, the same for all; ± is the standard deviation over them."
        ]
    if tuned:
        by = f" by {_judge(part.tune_by)}" if part.tune_by else ""
        parts.append(
            f"Each is tuned over its own grid{by} on the {_first_seeds(part)}; * marks a value at the end of its grid."
        )
    if part.budget is not None:
        parts.append(f"Results are read at the last evaluation within {part.budget.words()}.")
        if any("best of grid" in heading for one in entries for heading in one.at):  # of 0.2
            parts.append(
                f"Columns at another cost show the best point of the same grid there, on the {_first_seeds(part)}."
            )
    if part.tail > 1:
        parts.append(f"A result is the mean of the last {part.tail:g} evaluations.")
    return " ".join(parts)


def standing(part: Part, entries: Entries) -> str:
    """Return the run with the best last value and how far it is; empty if all runs diverged or failed."""
    best = ranked(part, entries)[0]
    if not best.final.whole:
        return ""
    spent, unit = best.series.spent, " %" * (scale_of(part.metric) == 100)
    value = f"{name_of(part.metric)} {shown(part.metric, best.final)}{unit}"
    far = f"after {spent['round'][-1]:.0f} rounds and {spent['total'][-1] / 1e6:.3g} MB in both directions"
    return f"{best.label}{' has the best last value' if len(entries) > 1 else ''}: {value} {far}."
