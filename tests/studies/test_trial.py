"""The trial of the theorem: every experiment runs in a short form, and a verdict follows from what was measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from markupsafe import escape
from rich.console import Console

import claims
from fedspan.core.errors import SpecError
from reproduce import reproduce
from runs import Run, Trial, load


def tiny() -> Trial:
    """A few rounds of the first and the last run of every experiment."""
    trial = load("smoke", 2)
    short = []
    for one in trial.experiments:
        ends = [one.specs[0], one.specs[-1]]
        specs = [
            (point, dataclasses.replace(spec, rounds=20, eval_every=2)) for point, spec in ends
        ]
        short.append(dataclasses.replace(one, specs=specs))
    return dataclasses.replace(trial, experiments=short)


@pytest.mark.slow
def test_every_experiment_gives_verdicts_and_its_place_on_the_page(tmp_path: Path) -> None:
    trial = tiny()
    judged = reproduce(trial, tmp_path, jobs=1, console=Console(quiet=True))
    page, text = (tmp_path / "index.html").read_text(), (tmp_path / "tables.md").read_text()
    for one in trial.experiments:
        assert f"<li>{escape(one.title)}: " in page  # one sentence per question
    assert len(judged) > len(trial.experiments)
    for claim in judged:
        assert claim.text in text
    lines = [line for line in text.splitlines() if line.startswith("| Lemma 2")]
    assert len(lines) == 2
    assert all(line.endswith("yes |") for line in lines)


def test_every_experiment_has_a_judge() -> None:
    assert {one.name for one in tiny().experiments} == set(claims.JUDGES)
    with pytest.raises(SpecError, match="scale"):
        load("huge")


def run(values: dict[str, np.ndarray], point: dict[str, object], rounds: np.ndarray) -> Run:
    return Run(point, tiny().experiments[0].specs[0][1], rounds, values)


def test_a_factor_is_read_off_a_decay() -> None:
    rounds = np.arange(40.0)
    one = run({"control_error": np.stack([0.8**rounds] * 2)}, {}, rounds)
    assert claims.factor(one) == pytest.approx(0.8)


def test_a_verdict_can_be_no() -> None:
    rounds = np.arange(40.0)
    for kept, holds in ((0.89, True), (0.97, False)):
        point = {"method.space.rank": 4, "clients_per_round": 20}
        lemma, ours = claims.contraction(
            [run({"control_error": np.stack([kept**rounds] * 2)}, point, rounds)]
        )
        assert lemma.holds is holds  # 1 − ρ/2 = 0.95
        assert ours.holds is False or kept == 0.89


def test_slopes_and_their_interval() -> None:
    x = [1.0, 2.0, 4.0]
    exact, half = claims.slope(x, np.array([[1.0, 2.0], [0.5, 1.0], [0.25, 0.5]]))
    assert exact == pytest.approx(-1)
    assert half == pytest.approx(0, abs=1e-12)
    _, wide = claims.slope(x, np.array([[1.0, 1.0], [0.5, 0.8], [0.25, 0.6]]))
    assert wide > 0.1


def test_rounds_to_a_share_of_the_start() -> None:
    rounds = np.arange(0.0, 50, 10)
    one = run(
        {"grad_sq": np.array([[1.0, 0.5, 0.009, 0.2, 0.1], [1.0, 1.0, 1.0, 1.0, 1.0]])}, {}, rounds
    )
    np.testing.assert_array_equal(claims.rounds_to(one, 0.01), [20, 40])
