"""The weight of the code, and the files that a round crosses: each figure may fall, and none may grow."""

from __future__ import annotations

import house
import pytest
import walk

MOST = {"tokens": 255_000, "tokens per line": 10.0, "classes": 312}


@pytest.fixture(scope="module")
def weight() -> dict[str, float]:
    return house.weigh()


@pytest.mark.parametrize("figure", MOST)
def test_the_house_does_not_grow(weight: dict[str, float], figure: str) -> None:
    assert weight[figure] <= MOST[figure]


def test_few_combinations_are_refused_and_in_one_place() -> None:
    assert house.refused() <= 20


def test_a_round_crosses_few_files() -> None:
    assert len(walk.of_run()) <= 16
    assert len(walk.of_fit()) <= 20


def test_a_comparison_begins_soon() -> None:
    assert house.before_first_run() <= 25


def test_what_is_counted() -> None:
    """Comments and docstrings weigh nothing, and a line with a comment is a line of code."""
    assert house.refused() > 5
    assert "methods/box.py" in walk.of_run()


def test_ssf_is_a_recipe() -> None:
    lines = (walk.ROOT / "methods" / "ssf.py").read_text("utf-8").splitlines()
    assert len(lines) <= 90
