"""Budgets: written with units, planned into rounds from packed messages, and kept by the runs' own ledgers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedspan.api.run import run
from fedspan.core.errors import SpecError
from fedspan.core.spec import Spec
from fedspan.study.budget import Budget, sized
from support.loops import SMALL
from support.runs import series_of

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg"},
    "ssf": {"name": "ssf", "space": {"name": "gaussian", "rank": 3}},
}


def spec(method: str, **changes: Any) -> Spec:
    table = {"rounds": 5, "eval_every": 3, "task": SMALL, "batch_size": 4, "clients_per_round": 3}
    return Spec.from_table(
        table | {"method": METHODS[method] | {"lr": 0.02, "local_steps": 2}} | changes
    )


def budget(*texts: str) -> Budget:
    found = Budget.parse(texts)
    assert found is not None
    return found


def test_units() -> None:
    assert budget("up=10MB").limits == {"up": 1e7}
    assert budget("total = 1.5 kB", "rounds=20").limits == {"total": 1500.0, "round": 20.0}
    assert budget("up=1e3B").limits == {"up": 1000.0}
    assert Budget.parse([]) is None
    assert budget(*budget("up=2.5MB", "rounds=7").texts()) == budget("up=2.5MB", "rounds=7")
    assert budget("up=2.5MB", "rounds=7").words() == "2.5 MB up and 7 rounds"
    assert [sized(v) for v in (0, 999, 1e3, 2.5e9)] == ["0 B", "999 B", "1 kB", "2.5 GB"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("10MB", "written up=10MB, total=50MB or rounds=200, got '10MB'"),
        ("upp=10MB", "did you mean 'up'?"),
        ("up=10", "one of the units B, kB, MB, GB, such as 10MB, got '10'"),
        ("up=10mb", "one of the units B, kB, MB, GB, such as 10MB, got '10mb'"),
        ("up=-3MB", "got '-3MB'"),
        ("up=1.2.3MB", "such as 10MB, got '1.2.3MB'"),
        ("total=0MB", "at least 1 B"),
        ("rounds=2.5", "`rounds` must be a whole number of at least 1, got 2.5"),
        ("rounds=0", "`rounds` must be a whole number of at least 1"),
    ],
)
def test_mistakes_are_named(text: str, words: str) -> None:
    with pytest.raises(SpecError) as error:
        Budget.parse([text])
    assert words in str(error.value)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rounds", [1, 7, 55])
def test_uplink_is_planned_to_the_round(method: str, rounds: int, tmp_path: Path) -> None:
    """A run as long as planned has sent no more than the budget, and one round more would have."""
    one = run(spec(method, rounds=1), tmp_path / "one").runs[0][-1]["up_bytes"]
    for more, wanted in ((0, rounds), (one - 1, rounds), (one, rounds + 1)):
        assert budget(f"up={rounds * one + more}B").rounds(spec(method)) == wanted


def test_total_bytes_are_planned_closely(tmp_path: Path) -> None:
    """Downloads depend on who is drawn, so the plan is a forecast; over 200 rounds it is good to some per cent."""
    planned = budget("total=60kB").rounds(spec("ssf"))
    last = run(spec("ssf", rounds=planned), tmp_path / "run").runs[0][-1]
    assert last["up_bytes"] + last["down_bytes"] == pytest.approx(60e3, rel=0.05)


def test_the_first_limit_counts() -> None:
    assert budget("up=1MB", "rounds=4").rounds(spec("fedavg")) == 4
    assert budget("rounds=9").rounds(spec("fedavg")) == 9
    with pytest.raises(
        SpecError, match="less than one round of 'fedavg', which sends 288 B up and 288 B down"
    ):
        budget("up=200B").rounds(spec("fedavg"))


def test_a_curve_is_read_at_the_last_row_within() -> None:
    rows = [
        {
            "round": t,
            "up_bytes": 10 * t,
            "down_bytes": 30 * t,
            "seconds": 0.1 * t,
            "loss": 1.0 / (t + 1),
        }
        for t in range(6)
    ]
    rows[5]["diverged"] = True
    curve = series_of([rows]).curve("loss")
    assert curve.within(budget("up=35B").limits).rounds.tolist() == [0, 1, 2, 3]
    assert curve.within(budget("total=80B", "up=50B").limits).rounds.tolist() == [0, 1, 2]
    assert curve.within(budget("up=1B").limits).rounds.tolist() == [0]
    assert curve.tail(1).text("", "") == "diverged"
    assert curve.within(budget("up=40B").limits).tail(1).mean == pytest.approx(
        0.2
    )  # the divergence came after the budget
    assert np.isnan(curve.values[0, 5])
