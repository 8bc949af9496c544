"""The verdict of a comparison, over constructed results."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from fedspan.study.budget import Budget
from fedspan.study.curves import Series
from fedspan.study.model import Case, Part, Variant
from fedspan.study.results import Entry
from fedspan.study.tuning import Tried, by_seed
from fedspan.study.verdict import said as sentences
from fedspan.study.verdict import told_apart
from support.runs import series_of

SPEC = {"rounds": 10, "method": {"name": "fedavg", "lr": 0.1}}


def verdict(of: Part, entries: list[Entry]) -> str:
    """The sentences as one text."""
    return " ".join(sentences(of, entries))


def part(labels: Any, grid: Any = None, **more: Any) -> Part:
    variants = [Variant(label, label, "", {}, dict(grid or {})) for label in labels]
    return Part(name="study", base=SPEC, variants=variants, **{"metric": "accuracy"} | more)


def entry(of: Part, label: str, ends: list[float], sent: float = 1e6, **more: Any) -> Entry:
    """A method whose seeds rise linearly to their ends over two evaluations; nan: the seed diverged."""
    runs: list[Any] = []
    for end in ends:
        rows = [
            {"round": t, "up_bytes": sent * t / 10, "down_bytes": sent * t / 10, "seconds": 1.0}
            for t in (0, 5, 10)
        ]
        values = [0.1, 0.5 * (0.1 + end), end]
        runs.append([row | {of.metric: v} for row, v in zip(rows, values, strict=True)])
        if math.isnan(end):
            runs[-1][-1]["diverged"] = True
    series = Series.of(label, "", SPEC, range(len(ends)), runs)
    curve = series.curve(of.metric)
    until = None if of.budget is None else int(of.inside(curve).rounds[-1])
    return Entry(
        0,
        label,
        series,
        of.result(curve),
        curve.best(of.goal),
        ends=by_seed(of, curve),
        until=until,
        **more,
    )


def said(results: dict[str, list[float]], sent: dict[str, float] | None = None, **more: Any) -> str:
    of = part(results, **more)
    return verdict(
        of,
        [entry(of, label, ends, (sent or {}).get(label, 1e6)) for label, ends in results.items()],
    )


def test_the_seeds_support_it() -> None:
    text = said({"SSF": [0.95, 0.94, 0.96], "FedAvg": [0.90, 0.89, 0.90]})
    assert text == (
        "Take SSF after 10 rounds: accuracy 95.0 %, 5.3 points higher than FedAvg (89.7 %); the 3 seeds support it."
    )


def test_seeds_are_paired() -> None:
    """A difference that every seed shows is seen, although the seeds themselves differ more."""
    seeds = np.array([0.5, 0.7, 0.9])
    assert "support it" in said({"A": list(seeds + 0.02), "B": list(seeds)})
    assert "do not tell A" in said({"A": [0.52, 0.92, 0.72], "B": list(seeds)})


def test_the_seeds_do_not_tell_them_apart() -> None:
    text = said(
        {"SSF": [0.95, 0.90, 0.97], "FedAvg": [0.94, 0.95, 0.90]}, sent={"SSF": 1e6, "FedAvg": 4e6}
    )
    assert text == (
        "The 3 seeds do not tell SSF (accuracy 94.0 %) apart from FedAvg (93.0 %) after 10 rounds; of these, SSF sends "
        "least in both directions, 2 MB."
    )
    assert "sends least" not in said({"SSF": [0.95, 0.90], "FedAvg": [0.94, 0.95]})


def test_a_tie() -> None:
    assert said({"A": [0.9, 0.9], "B": [0.9, 0.9]}).startswith(
        "The 2 seeds do not tell A (accuracy 90.0 %) apart"
    )
    assert (
        said({"A": [0.9], "B": [0.9]})
        == "In one seed A and B end equal after 10 rounds: accuracy 90.0 %."
    )


def test_rounding_is_no_difference() -> None:
    """Two results that agree in all digits that are shown, each seed of one a millionth lower."""
    errors = np.array([0.0061, 0.0060, 0.0059])
    text = said({"A": list(errors), "B": list(errors * (1 + 1e-6))}, metric="rel_err", goal="min")
    assert text.startswith("The 3 seeds do not tell A (relative error 0.006) apart from B (0.006)")


def test_one_seed() -> None:
    text = said({"A": [0.9], "B": [0.8]})
    assert text == (
        "A is ahead after 10 rounds: accuracy 90.0 %, 10.0 points higher than B (80.0 %) in one seed."
    )


def test_many_seeds_support_what_one_of_them_reverses() -> None:
    text = said({"A": [0.9] * 9 + [0.84], "B": [0.85] * 10})
    assert text.startswith("Take A after 10 rounds")


def test_ahead_in_every_seed_is_not_yet_sure() -> None:
    text = said({"A": [0.95, 0.94, 0.96], "B": [0.94, 0.75, 0.90]})
    assert text.endswith(
        "than B (86.3 %) in each of the 3 seeds, but the 95 % interval of the difference, −14.4 to 31.8 points, "
        "contains zero."
    )


def test_a_lower_error_is_better() -> None:
    text = said({"A": [2e-3, 2.1e-3], "B": [1e-3, 1.1e-3]}, metric="rel_err", goal="min")
    assert text.startswith(
        "Take B after 10 rounds: relative error 0.00105, 0.001 lower than A (0.00205)"
    )


def test_one_that_varies_does_not_hide_that_the_second_is_beaten() -> None:
    text = said({"A": [0.95, 0.94, 0.96], "B": [0.90, 0.89, 0.90], "C": [0.3, 0.94, 0.5]})
    assert text.startswith("Take A")
    assert text.endswith("support it (less so against C (58.0 %): results spread widely there).")


def test_divergence_and_failure_are_told_and_not_ranked() -> None:
    text = said({"A": [0.9, 0.91, 0.9], "B": [0.99, math.nan, 0.99]})
    assert text == "A after 10 rounds: accuracy 90.3 % over 3 seeds. B diverged in 1 of 3 seeds."
    assert (
        said({"A": [math.nan], "B": [math.nan]})
        == "No method has a result in every seed. A diverged; B diverged."
    )


def test_the_end_of_a_grid_and_what_decided() -> None:
    of = part("AB", {"method.lr": [0.1, 0.3, 1.0]}, tune_by="training_loss")
    ends = {"A": [0.9, 0.9], "B": [0.8, 0.8]}
    tried = [Tried({"method.lr": 0.3}, 10, entry(of, "A", [0.9]).final)]
    made = [entry(of, "A", ends["A"], point={"method.lr": 1.0}, at_edge=True, tried=tried)]
    made.append(entry(of, "B", ends["B"], point={"method.lr": 0.3}, tried=tried))
    assert verdict(of, made).endswith(
        "A (lr 1) is best at the end of its grid: a better value may lie beyond. "
        "Settings were chosen by the training loss on the first seed, not by the test set."
    )


def test_a_budget_that_is_not_reached_is_told() -> None:
    """B's last evaluation lies beyond the budget: it is read at round 5 of 10."""
    near, far = (
        said(
            {"A": [0.9, 0.9], "B": [0.95, 0.96]}, {"A": 1e6, "B": sent}, budget=Budget({"up": 1e6})
        )
        for sent in (1.9e6, 1.2e6)
    )
    assert near.startswith("Take A at 1 MB up: accuracy 90.0 %, 37.2 points higher than B (52.8 %)")
    assert "of the budget" not in near
    assert far.endswith("B is read at 60 % of the budget, where its last evaluation is.")


@pytest.mark.parametrize(
    ("gaps", "apart"), [([0.1, 0.1], True), ([0.1, -0.1], False), ([0.1, 0.12, 0.11], True)]
)
def test_two_results_are_told_apart_by_their_differences(gaps: list[float], apart: bool) -> None:
    of = part("AB")
    base = [0.5 + 0.1 * n for n in range(len(gaps))]
    one, two = (
        entry(of, "AB"[n], [b + n * g for b, g in zip(base, gaps, strict=True)]) for n in (0, 1)
    )
    assert told_apart(of, one, two) is apart


def test_of_several_rows_the_best_means_are_counted() -> None:
    of = part("AB", rows=[Case({"het": 0.0}), Case({"het": 1.0})])
    first = [entry(of, "A", [0.5]), entry(of, "B", [0.4])]
    second = [dataclasses.replace(one, row=1) for one in first]
    assert verdict(of, [*first, *second]) == "Highest mean accuracy: A in all 2 rows."
    second[1] = dataclasses.replace(entry(of, "B", [0.6]), row=1)
    assert verdict(of, [*first, *second]) == "Highest mean accuracy: A in 1 and B in 1 of 2 rows."
    assert verdict(of, first[:1]) == ""
    costs = part("AB", rows=[Case({"het": 0.0}, target=0.3), Case({"het": 1.0}, target=0.3)])
    assert verdict(costs, [*first, *second]) == ""


def test_a_curve_is_cut_where_the_dearest_seed_is_within_the_budget() -> None:
    """The mean over the seeds is within 100 bytes after round 2, one seed is not."""
    runs = [
        [
            {"round": t, "up_bytes": rate * t, "down_bytes": 0, "seconds": 0.0, "loss": 1.0}
            for t in range(4)
        ]
        for rate in (30, 60)
    ]
    curve = series_of(runs).curve("loss")
    assert curve.spent["up"].tolist() == [0, 45, 90, 135]
    assert curve.within({"up": 100.0}).rounds.tolist() == [0, 1]
    assert curve.within({"up": 120.0}).rounds.tolist() == [0, 1, 2]


def test_a_result_that_is_no_number_is_told() -> None:
    """An AUROC of one class is NaN, and the run has not diverged."""
    of = part("AB", metric="auroc")
    rows = [{"round": t, "up_bytes": t, "down_bytes": t, "seconds": 1.0} for t in (0, 5, 10)]
    values = [[None] * 3, [0.5, 0.6, 0.7], [0.5, 0.6, 0.9]]
    runs: list[Any] = [
        [row | {"auroc": v} for row, v in zip(rows, one, strict=True)] for one in values
    ]
    series = Series.of("B", "", SPEC, range(3), runs)
    curve = series.curve("auroc")
    lost = Entry(0, "B", series, of.result(curve), curve.best("max"), ends=by_seed(of, curve))
    text = verdict(of, [entry(of, "A", [0.5, 0.5, 0.6]), lost])
    assert (
        text
        == "A after 10 rounds: AUROC 0.533 over 3 seeds. B has no number as AUROC in 1 of 3 seeds."
    )
    assert lost.final.text("0.8", "0.1") == "0.8 ± 0.1 (1 of 3 NaN)"


@pytest.mark.parametrize("seeds", [2, 3, 5, 10])
def test_two_equal_methods_are_told_apart_at_the_level_of_the_interval(seeds: int) -> None:
    draw, claims = np.random.default_rng(seeds), 0
    for _ in range(400):
        one, two = draw.normal(0.9, 0.01, (2, seeds))
        text = said({"A": list(one), "B": list(two)})
        claims += text.startswith("Take")
        assert "sure" not in text
    assert (
        0.02 < claims / 400 < 0.085
    )  # 5 %, and three standard deviations of 400 draws on either side


@pytest.mark.parametrize("seeds", [2, 3])
def test_seeds_that_agree_by_rounding_support_nothing(seeds: int) -> None:
    """On 297 examples the differences of two equal methods are often the same number of examples in every seed."""
    draw, of, claims = np.random.default_rng(seeds), part("AB"), 0
    for _ in range(400):
        results = np.round(297 * draw.normal(0.9, 0.005, (2, seeds))) / 297
        claims += told_apart(
            of, *(entry(of, "AB"[n], list(results[n]), test_examples=297) for n in (0, 1))
        )
    assert claims / 400 < 0.05  # without the variance of the rounding up to 10 % for two seeds
    ahead = [
        entry(of, "A", [0.95] * seeds, test_examples=297),
        entry(of, "B", [0.9] * seeds, test_examples=297),
    ]
    assert told_apart(of, *ahead)


def test_the_noise_of_a_small_test_set_is_told() -> None:
    of = part("AB")
    made = [
        entry(of, "A", [0.95, 0.95], test_examples=297),
        entry(of, "B", [0.9, 0.91], test_examples=297),
    ]
    assert verdict(of, made).endswith(
        "This is over seeds, all measured on the same 297 test examples: another test set of that size would move the "
        "best accuracy by about ± 2.5 points."
    )


def test_a_subspace_that_holds_everything_has_nothing_to_gain() -> None:
    of = part("AB")
    made = [
        entry(of, "A", [0.9, 0.9], projected=[0, 410, 410]),
        entry(of, "B", [0.8, 0.8], projected=None),
    ]
    assert "A projects none of the 410 parameters and has nothing to gain" in verdict(of, made)
    made[0] = entry(of, "A", [0.9, 0.9], projected=[8192, 2237, 9610])
    assert "to gain" not in verdict(of, made)
    coded = SPEC | {
        "method": {
            "name": "ssf",
            "lr": 0.1,
            "uplink": {"name": "code", "compressor": {"name": "sign"}},
        }
    }
    bare = entry(of, "A", [0.9, 0.9], projected=[0, 410, 410])
    made[0] = dataclasses.replace(bare, series=dataclasses.replace(bare.series, spec=coded))
    assert "to gain" not in verdict(of, made)


def test_without_single_seeds_only_means_are_compared() -> None:
    """Of old results the seeds were not kept: nothing is said about pairs of them."""
    of = part("AB")
    found = [entry(of, "A", [0.9, 0.9]), entry(of, "B", [0.8, 0.8])]
    found = [dataclasses.replace(one, ends=[math.nan, math.nan]) for one in found]
    assert (
        verdict(of, found)
        == "A has the highest mean after 10 rounds: accuracy 90.0 %; next is B (80.0 %)."
    )
