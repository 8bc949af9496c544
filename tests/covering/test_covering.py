"""A pairwise covering run over all settings of a spec: each row of settings is compared with what it must equal."""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import types
from collections import Counter
from pathlib import Path

import pytest

from covering import checks, rows
from covering.pairwise import Row, pairs, seeded
from covering.settings import factors, fits
from fedspan.replies import noise

(KNOWN, ROWS), FAST, CHECKED = (
    rows.read(),
    60,
    2,
)  # rows that every run of the tests tries, and checks of each


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is removed; all keys of noise are the same, and nothing waits for the disk."""
    monkeypatch.setattr(
        noise, "secrets", types.SimpleNamespace(token_bytes=lambda n: bytes([7]) * n)
    )
    monkeypatch.setattr(os, "fsync", lambda _: None)
    return tmp_path


@pytest.mark.parametrize("number", range(FAST))
def test_row(number: int, folder: Path) -> None:
    case = checks.Case.of(ROWS[number], folder)
    able = checks.applying(case)
    for place in range(min(CHECKED, len(able))):
        able[(CHECKED * number + place) % len(able)](case)
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(ROWS)))
def test_row_in_full(number: int, folder: Path) -> None:
    case = checks.Case.of(ROWS[number], folder)
    for check in checks.applying(case):
        check(case)
    shutil.rmtree(folder)


def test_every_setting_is_in_a_row() -> None:
    assert {name: list(levels) for name, levels in factors().items()} == KNOWN, (
        "settings were added or changed; make the rows anew with `PYTHONPATH=tests python -m covering.rows`"
    )
    assert {name for row in ROWS for name in row} == set(factors())
    assert {name for row in ROWS[:FAST] for name in row} == set(factors())
    assert len(ROWS) >= 300
    assert FAST >= 60


def test_a_level_is_in_a_quick_row_or_is_refused(folder: Path) -> None:
    met = {one for row in ROWS[:FAST] for one in row.items()}
    for name, level in ((name, level) for name, levels in factors().items() for level in levels):
        if (name, level) not in met:
            _refused({name: level}, folder)


@pytest.mark.slow
def test_two_levels_meet_in_a_row_or_are_refused(folder: Path) -> None:
    met = {pair for row in ROWS for pair in itertools.combinations(row.items(), 2)}
    levels = dict.fromkeys(one for row in ROWS for one in row.items())
    usable = {name: [level for one, level in levels if one == name] for name in factors()}
    for pair in pairs(usable, rows.MAIN, fits):
        if pair not in met:
            _refused(dict(pair), folder)


def _refused(wanted: Row, folder: Path) -> None:
    """Asserts that nothing makes settings run, and that one line says why."""
    _, why = seeded(
        wanted,
        factors(),
        rows.MAIN,
        fits,
        functools.partial(checks.refusal, folder=folder),
        Counter(),
    )
    assert why is not None, f"no row has {wanted}; make the rows anew"
