"""What a comparison says, in words: which method to take, by how much, and whether the seeds support it.

Methods run under the same seeds, so two of them are compared by the differences of their results per seed. The seeds
support a difference if the 95 % interval of its mean (Student's t) does not contain zero: of two methods that are equal
one is then taken in 5 % of all comparisons. An accuracy is a multiple of one over the number of test examples, and the
variance of this rounding counts in the interval: seeds that agree by it alone would support anything. The interval is
about other seeds on the same test set; how far another test set would move an accuracy is said apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedspan.callbacks.training_loss import NAME as TRAIN_LOSS
from fedspan.study.budget import sized
from fedspan.study.curves import Floats
from fedspan.study.model import Part, in_percent, name_of, settings
from fedspan.study.results import Entry, Results
from fedspan.study.tuning import by_seed, edges

# 97.5 % quantiles of Student's t for 1, 2, … degrees of freedom; the last one serves for all that follow.
STUDENT = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
EQUAL = 1e-5  # a relative difference of two results that rounding over a run can make
CHEAPER = 0.9  # of methods that are equally good, one that sends less than this share of the most is mentioned
LONG = 150  # characters of a reason
CLOSE = 0.8  # a result that is read at less than this share of its budget is mentioned
LITTLE = 0.9  # a method that sends this share of a model's parameters or more has little to gain


def said(part: Part, entries: Sequence[Entry]) -> list[str]:
    """One sentence per question: which method, and what to know about that answer."""
    if len(part.rows) > 1 or not entries:
        return _best_by_row(part, entries)
    questions = (_choice, _noise, _edge, _lost, _little_to_gain, _how)
    return [text for about in questions if (text := about(part, entries))]


def verdict(part: Part, entries: Sequence[Entry]) -> str:
    """The sentences as one text."""
    return " ".join(said(part, entries))


def verdict_of(results: Results) -> str:
    """The verdict of a study that is one comparison; empty for others, whose parts have claims of their own."""
    parts = results.study.parts
    return verdict(parts[0], results.entries[parts[0].name]) if len(parts) == 1 else ""


def _best_by_row(part: Part, entries: Sequence[Entry]) -> list[str]:
    """Which methods have the best mean in how many rows; nothing where rows compare costs or one method alone."""
    winners: list[str] = []
    for number in range(len(part.rows)):
        here = [one for one in entries if one.row == number and one.final.whole]
        if len(here) > 1 and part.rows[number].target is None:
            winners.append(max(here, key=lambda one: _sign(part) * one.final.mean).series.label)
    if not winners:
        return []
    counts = sorted(
        ((winners.count(label), label) for label in dict.fromkeys(winners)),
        key=lambda pair: -pair[0],
    )
    all_rows = f"all {len(winners)}" if len(counts) == 1 else ""
    named = [f"{label} in {all_rows or count}" for count, label in counts]
    most, of_rows = (
        "Highest" if part.goal == "max" else "Lowest",
        "" if all_rows else f" of {len(winners)}",
    )
    return [f"{most} mean {name_of(part.metric)}: {_listed(named)}{of_rows} rows."]


def _choice(part: Part, entries: Sequence[Entry]) -> str:
    """Which method to take."""
    ranked = sorted(
        (one for one in entries if one.final.whole), key=lambda one: -_sign(part) * one.final.mean
    )
    if not ranked:
        return "No method has a result in every seed."
    best, others = ranked[0], ranked[1:]
    where, seeds = _where(part), len(_ends(part, best))
    value = f"{name_of(part.metric)} {_value(part, best)}"
    if not others:
        return f"{best.series.label}{where}: {value}{_over(seeds)}."
    if not all(
        math.isfinite(end) for one in ranked[:2] for end in _ends(part, one)
    ):  # only means were kept
        most = "highest" if part.goal == "max" else "lowest"
        return f"{best.series.label} has the {most} mean{where}: {value}; next is {_named(part, others[0])}."
    if seeds == 1 and best.final.mean == others[0].final.mean:
        return f"In one seed {best.series.label} and {others[0].series.label} end equal{where}: {value}."
    apart = [told_apart(part, best, one) for one in others]
    sure = [told or ahead(part, best, one) for told, one in zip(apart, others, strict=True)]
    if mixed := others[: sure.index(True)] if True in sure else others:
        return _undecided(part, best, mixed)
    second = f"{value}, {_gap(part, best, others[0])} than {_named(part, others[0])}"
    if not apart[0]:
        spread = (
            f"in each of the {seeds} seeds, but {_interval(part, best, others[0])}"
            if seeds > 1
            else "in one seed"
        )
        return f"{best.series.label} is ahead{where}: {second} {spread}."
    noisy = [_named(part, one) for one, told in zip(others, apart, strict=True) if not told]
    but = f" (less so against {_listed(noisy)}: results spread widely there)" if noisy else ""
    return f"Take {best.series.label}{where}: {second}; the {seeds} seeds support it{but}."


def _undecided(part: Part, best: Entry, others: Sequence[Entry]) -> str:
    """Methods of which no one is ahead in every seed, and the cheapest of them."""
    listed = _listed([_named(part, one) for one in others])
    seeds, first = (
        len(_ends(part, best)),
        f"{best.series.label} ({name_of(part.metric)} {_value(part, best)})",
    )
    text = f"The {seeds} seeds do not tell {first} apart from {listed}{_where(part)}"
    least = min([best, *others], key=lambda one: _sent(part, one))
    if _sent(part, least) < CHEAPER * max(_sent(part, one) for one in (best, *others)):
        return f"{text}; of these, {least.series.label} sends least in both directions, {sized(_sent(part, least))}."
    return f"{text}."


def ahead(part: Part, one: Entry, other: Entry) -> bool:
    """Whether a result is better in every seed."""
    return bool((_sign(part) * _gaps(part, one, other) > 0).all())


def told_apart(part: Part, one: Entry, other: Entry) -> bool:
    """Whether the seeds support that two results differ."""
    gaps = _gaps(part, one, other)
    return len(gaps) > 1 and abs(float(gaps.mean())) > _half(part, one, gaps)


def _half(part: Part, one: Entry, gaps: Floats) -> float:
    """Half of the 95 % interval of a mean difference."""
    rounding = 0.0
    if part.metric == "accuracy" and one.test_examples is not None:
        rounding = 1 / (
            6 * one.test_examples**2
        )  # of two accuracies, each a multiple of 1/n: 2 (1/n)²/12
    deviation = math.sqrt(float(gaps.var(ddof=1)) + rounding)
    return STUDENT[min(len(gaps) - 1, len(STUDENT)) - 1] * deviation / math.sqrt(len(gaps))


def _interval(part: Part, one: Entry, other: Entry) -> str:
    gaps = _sign(part) * _gaps(part, one, other)
    mean, half = float(gaps.mean()), _half(part, one, gaps)
    low, high = mean - half, mean + half
    ends = (
        f"{100 * low:.1f} to {100 * high:.1f} points"
        if in_percent(part.metric)
        else f"{low:.2g} to {high:.2g}"
    )
    return f"the 95 % interval of the difference, {ends}, contains zero".replace("-", "−")


def _noise(part: Part, entries: Sequence[Entry]) -> str:
    """What the intervals over seeds leave out."""
    ranked = [one for one in entries if one.final.whole]
    sizes = {one.test_examples for one in entries} - {None}
    validated = part.metric.startswith("validation_")
    if len(ranked) < 2 or len(sizes) != 1 or validated:
        return ""
    (count,) = sizes
    assert count is not None
    start = f"This is over seeds, all measured on the same {count:,} test examples"
    if part.metric != "accuracy":
        return f"{start}, whose choice the seeds do not show."
    best = max(ranked, key=lambda one: one.final.mean)
    half = _points(min(best.final.mean, 1 - 1 / count), count)
    return f"{start}: another test set of that size would move the best accuracy by about ± {half:.1f} points."


def _points(p: float, count: int) -> float:
    """Half of the 95 % interval of an accuracy on so many examples, in points."""
    return 196 * math.sqrt(max(p * (1 - p), 0) / count)


def _edge(part: Part, entries: Sequence[Entry]) -> str:
    """Which best settings lie at an end of their grid."""
    found = []
    for one in entries:
        at_end = edges(part.variant(one.variant), one.point) if one.at_edge else {}
        found += [f"{one.series.label} ({settings(at_end)})"] if at_end else []
    if not found:
        return ""
    verb = (
        "is best at the end of its grid"
        if len(found) == 1
        else "are best at the ends of their grids"
    )
    return f"{_listed(found)} {verb}: a better value may lie beyond."


def _lost(part: Part, entries: Sequence[Entry]) -> str:
    """Which methods have no result, or one far below the budget."""
    found = []
    for one in entries:
        label, seeds = one.series.label, one.final.seeds
        for word, count in one.final.lost.items():
            many = f" in {count} of {seeds} seeds" if seeds > 1 else ""
            what = word if word != "NaN" else f"has no number as {name_of(part.metric)}"
            found.append(f"{label} {what}{many}{_reason(one) if word == 'failed' else ''}")
        if one.final.whole and part.budget is not None and (share := _share(part, one)) < CLOSE:
            found.append(
                f"{label} is read at {100 * share:.0f} % of the budget, where its last evaluation is"
            )
    return f"{'; '.join(found)}." if found else ""


def _little_to_gain(_part: Part, entries: Sequence[Entry]) -> str:
    """Which methods of a subspace send almost all parameters."""
    found = []
    for one in entries:
        if one.projected is None or "compressor" in one.series.spec["method"]:
            continue
        projected, sent, parameters = one.projected
        share = "none" if not projected else f"{projected:,}"
        if not projected or sent >= LITTLE * parameters:
            gain = "nothing" if not projected else "little"
            found.append(
                f"{one.series.label} projects {share} of the {parameters:,} parameters and has {gain} to gain"
            )
    if not found:
        return ""
    return f"{'; '.join(found)}: biases, small tensors and the output head are sent in full."


def _reason(entry: Entry) -> str:
    """Why a run failed, cut short."""
    why = entry.failures[0].partition(": ")[2] if entry.failures else ""
    return f" ({why if len(why) < LONG else why[:LONG] + '…'})" if why else ""


def _how(part: Part, entries: Sequence[Entry]) -> str:
    """By what the settings were chosen."""
    searched = any(one.found_lr for one in entries)
    tuned = any(one.tried for one in entries)
    if not tuned and not searched:
        return _untuned(part, entries)
    by = name_of(part.tune_metric) if part.tune_metric != TRAIN_LOSS else "the training loss"
    if not tuned:
        validated = part.tune_metric.startswith("validation_")
        return f"Step sizes were searched by {'the validation loss' if validated else by}."
    same = (
        ", the metric of the results"
        if part.tune_metric == part.metric
        else ", not by the test set"
    )
    return f"Settings were chosen by {by} on {_first_seeds(part)}{same}."


def _untuned(part: Part, entries: Sequence[Entry]) -> str:
    """That methods have run with one step size, which suits some of them better than others."""
    rates = [one.series.spec["method"].get("lr") for one in entries]
    given = isinstance(rates[0], float | int) and rates.count(rates[0]) == len(rates) > 1
    if not given or part.name != "comparison":  # parts of a study are made as they are on purpose
        return ""
    return (
        f"Not tuned: every method runs with the lr that is given, {rates[0]:g}; give --grid or --set method.lr=search, "
        "in Python `tune`."
    )


def _first_seeds(part: Part) -> str:
    return "the first seed" if part.tuning_seeds == 1 else f"the first {part.tuning_seeds} seeds"


def _ends(part: Part, entry: Entry) -> list[float]:
    return entry.ends or by_seed(part, entry.curve(part))


def _gaps(part: Part, one: Entry, other: Entry) -> Floats:
    """The differences of two results, per seed; 0 for those of rounding."""
    mine, others = np.array(_ends(part, one), float), np.array(_ends(part, other), float)
    return np.where(np.isclose(mine, others, rtol=EQUAL, atol=0.0), 0.0, mine - others)


def _sent(part: Part, entry: Entry) -> float:
    return float(entry.curve(part).spent("total")[-1])


def _share(part: Part, entry: Entry) -> float:
    """The part of the budget that was spent where the result is read, on the axis that is used up first."""
    assert part.budget is not None
    return max(
        float(entry.curve(part).spent(axis)[-1]) / most for axis, most in part.budget.limits.items()
    )


def _sign(part: Part) -> int:
    return 1 if part.goal == "max" else -1


def _where(part: Part) -> str:
    return (
        f" at {part.budget.words()}"
        if part.budget is not None
        else f" after {part.base['rounds']} rounds"
    )


def _over(seeds: int) -> str:
    return f" over {seeds} seeds" if seeds > 1 else ""


def _value(part: Part, entry: Entry) -> str:
    mean = entry.final.mean
    return f"{100 * mean:.1f} %" if in_percent(part.metric) else f"{mean:.3g}"


def _named(part: Part, entry: Entry) -> str:
    return f"{entry.series.label} ({_value(part, entry)})"


def _gap(part: Part, best: Entry, other: Entry) -> str:
    gap = abs(best.final.mean - other.final.mean)
    amount = f"{100 * gap:.1f} points" if in_percent(part.metric) else f"{gap:.2g}"
    return f"{amount} {'higher' if part.goal == 'max' else 'lower'}"


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
