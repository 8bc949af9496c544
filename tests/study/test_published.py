"""Published numbers and claimed orders: verdicts say what was seen."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fedspan.study import tables
from fedspan.study.curves import Tail
from fedspan.study.model import Case, Part, Study, Variant
from fedspan.study.results import Entry, Results
from fedspan.study.tables import judge, number, orders, score
from support.runs import line

CLOSE, FAR, DEAD = (
    Tail(1.14e-3, 1e-5, 0, 3),
    Tail(1.2e-3, 1e-5, 0, 3),
    Tail(math.nan, math.nan, 3, 3),
)
SOME = Tail(1e-3, 1e-5, 1, 3)


@pytest.mark.parametrize(
    ("ours", "value", "holds"),
    [
        (CLOSE, 1e-3, True),
        (FAR, 1e-3, False),
        (DEAD, "nan", True),
        (CLOSE, "nan", False),
        (SOME, "nan", False),
        (SOME, 1e-3, False),
        (DEAD, 1e-3, False),
    ],
)
def test_verdicts(ours: Tail, value: Any, holds: bool) -> None:
    judged, (entry,) = part("a", [ours], rows=[Case({}, {"a": value})], within=0.15)
    assert judge(judged, entry)[0] is holds


def test_words() -> None:
    judged, (entry,) = part("a", [FAR], rows=[Case({}, {"a": 1e-3})], within=0.15)
    assert judge(judged, entry)[2] == "+20 %"
    assert [tables.shown("loss", tail) for tail in (DEAD, SOME)] == [
        "diverged",
        "1.00e-3 ± 1e-5 (1 of 3 diverged)",
    ]
    assert number(6.234e-3) == "6.23e-3"


def part(names: str, ends: list[Tail], **changes: Any) -> tuple[Part, list[Entry]]:
    """A part with given results, in one row."""
    variants = [Variant(name, name.upper(), "", {}, {}) for name in names]
    usual: dict[str, Any] = {"metric": "loss", "goal": "min", "base": {"rounds": 1}}
    found = [
        Entry(0, v.name, line(v.label, [1.0, 0.5]), end, end)
        for v, end in zip(variants, ends, strict=True)
    ]
    return Part(name="p", variants=variants, **usual | changes), found


def test_every_published_number_counts_once() -> None:
    rows = [Case({"het": 2.0}, {"a": 1e-3, "b": 1e-3, "c": {"method.lr": 0.1}}), Case({"het": 3.0})]
    judged, entries = part("abcd", [CLOSE, FAR, CLOSE, CLOSE], rows=rows, within=0.15)
    results = Results(Study("s", [judged]), {"p": entries}, "", 0.0, {})
    assert (
        score(results)
        == "Published numbers that our results reproduce within 15 %: A 1 of 1, B 0 of 1."
    )
    assert judge(judged, entries[2])[0] is False  # another point was chosen
    assert judge(judged, entries[3])[0] is None
    cells = tables.results(judged, entries).texts()[0]
    assert cells[1:3] == [
        "1.14e-3 ± 1e-5 (✓ published 1.00e-3, +14 %)",
        "1.20e-3 ± 1e-5 (✗ published 1.00e-3, +20 %)",
    ]


def test_a_short_run_is_not_judged() -> None:
    short, entries = part("a", [FAR], rows=[Case({"het": 2.0}, {"a": 1e-3})])
    assert judge(short, entries[0])[0] is None
    assert score(Results(Study("s", [short]), {"p": entries}, "", 0.0, {})) == ""


def test_an_order_holds_only_beyond_the_spread() -> None:
    ends = [Tail(*end, 0, 3) for end in ((0.5, 0.01), (0.45, 0.01), (0.449, 0.02), (0.6, 0.01))]
    claims = {"claims": [["a", "b", "c"], ["b", "c", "d"]]}
    notes = orders(*part("abcd", ends, metric="accuracy", goal="max", **claims))
    assert notes[0] == "A > B: holds (+5.0 ± 1.4 points)"
    assert "within the spread (+0.1" in notes[1]
    assert "reversed (-15.1" in notes[2]
    assert len(notes) == 3
    nothing = [Tail(0.5, math.nan, 0, 1)] * 4
    assert "one seed" in orders(*part("abcd", nothing, metric="accuracy", goal="max", **claims))[0]


@pytest.mark.parametrize(
    ("first", "words"),
    [(20.0, "holds (-1.00"), (22.0, "reversed (+1.00"), (20.6, "within the spread (-0.40")],
)
def test_less_may_be_better(first: float, words: str) -> None:
    ends = [Tail(first, 0.3, 0, 3), Tail(21.0, 0.4, 0, 3)]
    (note,) = orders(*part("ab", ends, metric="perplexity", claims=[["a", "b"]]))
    assert note == f"A < B: {words} ± 0.50 of perplexity)"
