"""What a comparison reads off its grids: a step that is best for one cost need not be for another."""

from __future__ import annotations

import pytest
from rich.console import Console

from conftest import SMALL
from fedspan.study.outcome import Outcome
from fedspan.study.plan import Comparison, Variant
from fedspan.study.pool import execute

STEPS = Variant("fedavg", "FedAvg", "#E69F00", {}, {"method.lr": [0.1, 0.03, 0.01]})


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Noisy gradients: a long step is ahead in the first rounds, a shorter one in the end."""
    base = {"rounds": 60, "eval_every": 2, "task": SMALL, "participation": {"clients_per_round": 3}}
    base["method"] = {"name": "fedavg", "local_steps": 3}
    plan = Comparison(name="c", base=base, variants=[STEPS], seeds=2, metric="rel_err", goal="min", tail=2)
    runs, quiet = tmp_path_factory.mktemp("runs"), Console(quiet=True)
    execute(plan.tuning(runs), 1, quiet, "")
    execute(plan.final(runs, Outcome(plan, runs).chosen()), 1, quiet, "")
    return Outcome(plan, runs)


def test_the_step_that_ends_lowest_is_chosen(outcome: Outcome) -> None:
    ends = {trial.point["method.lr"]: trial.end.mean for trial in outcome.trials(STEPS)}
    assert outcome.chosen()["fedavg"]["method.lr"] == min(ends, key=lambda lr: ends[lr]) < 0.1
    assert outcome.best(STEPS).mean <= outcome.final(STEPS).mean


@pytest.mark.parametrize("axis", ["round", "up", "total"])
def test_for_fewer_rounds_or_bytes_a_longer_step_is_read_off_the_grid(outcome: Outcome, axis: str) -> None:
    """In tuning's own seeds, at the last rows within the cost."""
    longest = outcome.trials(STEPS)[0]
    cost = float(longest.curve.spent(axis)[4])  # type: ignore[arg-type]
    found = outcome.tuned_at(STEPS, axis, cost)  # type: ignore[arg-type]
    assert found.mean == pytest.approx(longest.curve.values[:, 3:5].mean(), rel=1e-12)
    assert found.seeds == 1
    assert found.mean < 0.9 * outcome.at(STEPS, axis, cost).mean  # type: ignore[arg-type]


def test_at_the_whole_cost_it_is_the_point_that_was_chosen(outcome: Outcome) -> None:
    """On all seeds: that one seed did better at another step is no reason to show that seed alone."""
    assert outcome.tuned_at(STEPS, "round", 60) == outcome.at(STEPS, "round", 60) == outcome.final(STEPS)
