"""The theory on trial: every part runs in a short form, and a verdict follows from what was measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from markupsafe import escape
from rich.console import Console

from fedspan.api.spec import Spec
from fedspan.core.errors import SpecError
from fedspan.study import paper_claims as claims
from fedspan.study import paper_trial as trial
from fedspan.study.paper_trial import Run, Trial


def tiny() -> Trial:
    """A few rounds of the first and the last run of every part."""
    study = Trial.load("theory", "smoke", 2)
    parts = []
    for part in study.parts:
        ends = [part.specs[0], part.specs[-1]]
        specs = [(point, Spec.from_table(spec.table() | {"rounds": 20, "eval_every": 2})) for point, spec in ends]
        parts.append(trial.Part(part.name, part.title, part.about, specs))
    return Trial(study.name, study.scale, study.title, study.about, study.seeds, parts)


def test_every_part_gives_verdicts_and_its_place_on_the_page(tmp_path: Path) -> None:
    study = tiny()
    trial.reproduce(study, tmp_path, jobs=1, again=False, console=Console(quiet=True))
    page, text = (tmp_path / "index.html").read_text(), (tmp_path / "tables.md").read_text()
    for part in study.parts:
        assert str(escape(part.title)) in page
        judged = claims.JUDGES[part.name](part.read(tmp_path / "runs-smoke", study.seeds))
        assert judged
        for one in judged:
            assert one.text in text
    lines = [line for line in text.splitlines() if line.startswith("| Lemma 2")]
    assert len(lines) == 2
    assert all(line.endswith("yes |") for line in lines)


def test_every_part_has_a_judge() -> None:
    assert {part.name for part in tiny().parts} == set(claims.JUDGES)
    with pytest.raises(SpecError, match="scale"):
        Trial.load("theory", "huge", None)


def run(values: dict[str, np.ndarray], point: dict[str, object], rounds: np.ndarray) -> Run:
    return Run(point, tiny().parts[0].specs[0][1], rounds, values)


def test_a_factor_is_read_off_a_decay() -> None:
    rounds = np.arange(40.0)
    one = run({"control_error": np.stack([0.8**rounds] * 2)}, {}, rounds)
    assert claims.factor(one) == pytest.approx(0.8)


def test_a_verdict_can_be_no() -> None:
    rounds = np.arange(40.0)
    for kept, holds in ((0.89, True), (0.97, False)):
        point = {"method.projector.rank": 4, "participation.clients_per_round": 20}
        lemma, ours = claims.contraction([run({"control_error": np.stack([kept**rounds] * 2)}, point, rounds)])
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
    one = run({"grad_sq": np.array([[1.0, 0.5, 0.009, 0.2, 0.1], [1.0, 1.0, 1.0, 1.0, 1.0]])}, {}, rounds)
    np.testing.assert_array_equal(claims.rounds_to(one, 0.01), [20, 40])
