"""Tuning stops settings that are hopeless, and only those; the winner is that of the whole grid."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from fedspan.core.errors import DataError
from fedspan.engine import history
from fedspan.engine.tuner import halve, stage_end
from fedspan.study import conduct, results, tables
from fedspan.study.model import Part, Study, Variant
from fedspan.study.tuning import Runs
from support.loops import RUN

ROOT = Path(__file__).parents[2]
GRID = {"method.lr": [1e-5, 0.007, 0.01, 1e6]}
SSF = Variant(
    "ssf", "SSF", "#000000", {"method": {"name": "ssf", "rank": 4, "local_steps": 3}}, GRID
)


def study(**changes: Any) -> Study:
    usual = {"base": RUN | {"rounds": 64, "eval_every": 2}, "variants": [SSF], "seeds": 1}
    return Study("s", [Part(name="p", metric="rel_err", goal="min", **usual | changes)])


def made(place: Path, of: Study) -> Runs:
    conduct.make_runs(of, place, jobs=1, console=Console(quiet=True))
    return Runs(of, place)


@pytest.fixture(scope="module")
def early(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return made(tmp_path_factory.mktemp("early"), study())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A figure of the grid needs every point in full."""
    return made(tmp_path_factory.mktemp("whole"), study(figure={"x": ["method.lr"]}))


def test_the_winner_is_that_of_the_whole_grid(early: Runs, whole: Runs) -> None:
    for one, other in zip(early.cells, whole.cells, strict=True):
        assert one.point == other.point
        files = [one.running()[0].histories()[0], other.running()[0].histories()[0]]
        rows = [[{**row, "seconds": 0} for row in history.read(file)[1]] for file in files]
        assert rows[0] == rows[1]  # also where a run was made in stages


def test_hopeless_points_end_at_their_stage(early: Runs, whole: Runs) -> None:
    tried = early.cells[0].tried
    assert [one.dropped for one in tried] == [True, False, False, False]
    assert [one.rounds for one in tried] == [16, 64, 64, 64]
    assert tried[-1].end.diverged
    assert not any(one.dropped for one in whole.cells[0].tried)
    rounds = {runs: sum(job.spec.rounds for job in runs.tuning()) for runs in (early, whole)}
    assert rounds[early] == rounds[whole] - 48


def test_a_report_says_which_points_were_stopped(early: Runs, tmp_path: Path) -> None:
    found = results.collect(early.study, early.place, "")
    (tmp_path / results.STUDY).write_text("")
    results.announce(early.study, tmp_path, "x")
    results.save(found, tmp_path)
    (part,), entries = early.study.parts, results.load(tmp_path).entries["p"]
    marks = [row[-1] for row in tables.tuning(part, entries[:1]).texts()]
    assert marks[0] == "stopped early"
    assert marks.count("chosen") == 1


def test_a_study_that_is_run_again_makes_no_run_again(early: Runs) -> None:
    paths = [path for job in early.jobs() for path in job.histories()]
    before = [path.stat().st_mtime_ns for path in paths]
    again = made(early.place, early.study)
    assert [path.stat().st_mtime_ns for path in paths] == before
    assert [cell.point for cell in again.cells] == [cell.point for cell in early.cells]


@pytest.mark.parametrize(
    ("values", "dropped"),
    [
        ([1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4], False),  # the best one
        ([1.0, 1.0, 0.99, 0.99, 0.99, 0.98, 0.98], True),  # no progress
        ([1.0, 1.4, 1.6, 1.5, 1.2, 1.0, 0.9], False),  # behind, but fast by now
        ([1.0, 0.8, 0.6, 0.55, 0.55, 0.55, 0.55], False),  # near the best one
        ([1.0, 3.0, 9.0, 9.0, 9.0, 9.0, 9.0], True),  # astray, and stays there
    ],
)
def test_who_is_hopeless(values: list[float], dropped: bool) -> None:
    curves = [np.array([one]) for one in ([1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4], values)]
    rounds = halve([24, 24], [1, 1], lambda n, _: curves[n], stages={0.25: 0.5})
    assert rounds == [24, 6 if dropped else 24]


def test_all_points_run_to_the_end_where_the_length_decides_the_numbers() -> None:
    def stages(grid: Any = GRID, **changes: Any) -> dict[float, float]:
        of = study(variants=[dataclasses.replace(SSF, grid=grid)], **changes)
        return Runs(of, Path("nowhere")).cells[0].stages

    base = RUN | {"rounds": 64, "eval_every": 2}
    assert stages()
    assert not stages(set={"method.schedule": "cosine"})
    assert not stages(base=base | {"rounds": 12})
    assert not stages({"method.lr": [0.01, 0.1]})


def test_a_point_at_which_one_seed_diverges_does_not_end_the_study(tmp_path: Path) -> None:
    """The others are run to the end, and so is what was chosen."""
    task = {"name": "regression", "clients": 4, "dim": 10, "outputs": 1, "samples": 10, "het": 2.0}
    method = {"name": "fedavg", "local_steps": 5}
    base = {"rounds": 64, "eval_every": 4, "batch_size": 5, "task": task, "method": method}
    fedavg = Variant("fedavg", "FedAvg", "#000000", {}, {"method.lr": [0.01, 0.02, 0.036]})
    of = study(base=base, variants=[fedavg], seeds=3, tune_seeds="all")
    runs = made(tmp_path, of)
    (cell,) = runs.cells
    assert [job.complete() for job in runs.jobs()] == [True] * len(runs.jobs())
    assert not cell.tried[2].end.whole
    assert cell.curve.rounds[-1] == 64


GRIDS = [
    json.loads(line)
    for line in (Path(__file__).parent / "tuning_curves.json").read_text().splitlines()
]


@pytest.mark.parametrize(
    "grid", GRIDS, ids=lambda grid: "-".join(grid[key] for key in ("study", "part", "variant"))
)
def test_the_committed_studies_have_the_winners_of_their_whole_grids(
    grid: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    whole, early, saved = importlib.import_module("halving").winners(grid)
    assert early == whole
    assert 0 <= saved < 1


def test_without_its_data_the_replay_leaves_the_curves_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    replayed = importlib.import_module("halving")
    curves = tmp_path / "curves.json"
    curves.write_text(json.dumps(GRIDS[0]) + "\n")
    monkeypatch.setattr(replayed, "CURVES", curves)
    monkeypatch.setenv("FEDSPAN_DATA", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["halving.py", "--studies", GRIDS[0]["study"], "mnist"])
    with pytest.raises(DataError, match="run `fedspan data get mnist` first"):
        replayed.main()
    assert json.loads(curves.read_text()) == GRIDS[0]


def test_a_rule_that_stops_the_slow_starters_changes_a_winner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The check above can fail: the best learning rate of some grid is not the fastest at the start."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    replayed = importlib.import_module("halving")

    def fastest(grid: Any) -> int:
        end = stage_end(grid["rounds"], grid["eval_every"], 0.25) // grid["eval_every"]
        sign = 1 if grid["goal"] == "max" else -1
        far = [sign * (np.array(one[0][: end + 1])[-1] - one[0][0]) for one in grid["curves"]]
        return int(np.argmax(far))

    assert any(fastest(grid) != replayed.winners(grid)[0] for grid in GRIDS)
