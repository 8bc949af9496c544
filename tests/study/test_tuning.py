"""The runs of a part: each variant at its own best point, under the same seeds, compared by round and by byte."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedspan.core.errors import CheckpointError, SpecError
from fedspan.engine import history
from fedspan.study import conduct, tables
from fedspan.study.budget import Budget
from fedspan.study.execute import execute
from fedspan.study.jobs import jobs_of, place_of, seconds
from fedspan.study.model import Case, Part, Study, Variant, filled, laid_over
from fedspan.study.results import collect
from fedspan.study.tuning import Cell, Runs, edges
from support.loops import SMALL

QUIET = Console(quiet=True)
IMAGES: dict[str, Any] = {
    "rounds": 8,
    "eval_every": 2,
    "method": {"name": "ssf", "rank": 0.25, "local_steps": 4},
    "task": {
        "name": "classification",
        "data": "digits",
        "per_class": 40,
        "partition": {"name": "dirichlet", "clients": 5},
    },
    "projection": {"min_numel": 64},
    "engine": {"simulate": "loop"},
}
FEDAVG = Variant(
    "fedavg",
    "FedAvg",
    "#E69F00",
    {"method": {"name": "fedavg", "local_steps": 4}},
    {"method.lr": [1e-6, 0.3, 1e9]},
)
SSF = Variant("ssf", "SSF", "#0072B2", {}, {"method.lr": [0.3]})


def study(**changes: Any) -> Study:
    usual = {"base": IMAGES, "variants": [FEDAVG, SSF], "seeds": 2, "tune_rounds": 4, "tail": 2}
    return Study("s", [Part(name="comparison", **usual | changes)])


def cell_of(runs: Runs, part: Part, row: Case, variant: Variant) -> Cell:
    (found,) = (
        one
        for one in runs.cells
        if (one.part.name, one.variant.name) == (part.name, variant.name) and one.row is row
    )
    return found


def cell(runs: Runs, variant: Variant) -> Cell:
    part = runs.study.parts[0]
    return cell_of(runs, part, part.rows[0], variant)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    place = tmp_path_factory.mktemp("runs")
    conduct.make_runs(study(), place, jobs=1, console=QUIET)
    return Runs(study(), place)


def test_the_best_point_is_chosen_and_a_divergence_is_not(runs: Runs) -> None:
    tried = cell(runs, FEDAVG).tried
    assert [one.end.diverged for one in tried] == [0, 0, 1]
    assert [cell(runs, v).point for v in (FEDAVG, SSF)] == [{"method.lr": 0.3}] * 2
    assert not edges(FEDAVG, {"method.lr": 0.3})
    assert cell(runs, SSF).tried == []


def test_a_point_at_an_end_of_the_grid_is_marked(runs: Runs) -> None:
    small = dataclasses.replace(FEDAVG, grid={"method.lr": [1e-6, 0.3]})
    (entry,) = collect(study(variants=[small]), runs.place, "").entries["comparison"]
    assert entry.at_edge
    assert tables.point_of(entry) == "lr 0.3*"


def test_later_seeds_do_not_change_the_choice(runs: Runs) -> None:
    """Tuning reads its own seed and its own rounds, although the same directory now holds more."""
    tried = cell(runs, FEDAVG).tried
    assert [one.end.seeds for one in tried] == [1, 1, 1]
    assert cell(runs, FEDAVG).curve.values.shape == (2, 5)
    place = place_of(runs.study.parts[0].spec(FEDAVG, {"method.lr": 0.3}), runs.place)
    rows = history.read(place / "seed-0" / "history.jsonl")[1]
    assert tried[1].end.mean == pytest.approx((rows[1]["accuracy"] + rows[2]["accuracy"]) / 2)


def test_equal_bytes(runs: Runs) -> None:
    """SSF sends less, so at its bytes FedAvg is read at an earlier round."""
    (part,), fedavg, ssf = runs.study.parts, cell(runs, FEDAVG), cell(runs, SSF)
    cost = cell(runs, SSF).equal_cost("up")
    assert cost == ssf.curve.spent["up"][-1] < fedavg.curve.spent["up"][-1]
    assert ssf.at("up", cost) == part.result(ssf.curve)
    rows = int((fedavg.curve.spent["up"] <= cost).sum())
    kept = fedavg.curve.values[:, :rows][:, -2:]
    assert fedavg.at("up", cost).mean == pytest.approx(kept.mean())


def test_a_budget_of_bytes_is_also_shown_in_rounds_and_in_both_directions(runs: Runs) -> None:
    (part,) = runs.study.parts
    limit = Budget({"up": cell(runs, SSF).equal_cost("up")})
    limited = study(budget=limit)
    within, (part,) = Runs(limited, runs.place), limited.parts
    entries = collect(limited, runs.place, "").entries["comparison"]
    grid = tables.results(part, entries)
    rounds, total = (cell(within, SSF).equal_cost(axis) for axis in ("round", "total"))
    assert grid.header[4:6] == [
        f"at {Budget({'total': total}).words()}",
        f"at {rounds:g} rounds",
    ]
    expected = [
        tables.shown("accuracy", cell(within, v).at("total", total)) for v in (SSF, FEDAVG)
    ]  # the best first
    assert [row[4] for row in grid.rows] == expected


def test_the_tables(runs: Runs) -> None:
    (part,), entries = runs.study.parts, collect(study(), runs.place, "").entries["comparison"]
    grid = tables.results(part, entries)
    assert [row[0] for row in grid.rows] == ["FedAvg", "SSF"]
    assert "accuracy after 8 rounds, %" in grid.header
    assert f"{100 * entries[1].final.mean:.1f} ± " in grid.texts()[1][2]
    tuned = tables.tuning(part, entries).texts()
    assert tuned[2][3:] == ["diverged", ""]
    assert [row[4] for row in tuned] == ["", "chosen", ""]
    assert grid.markdown().count("\n") == 4
    assert entries[1].best.mean == pytest.approx(cell(runs, SSF).curve.values.max(1).mean())


def test_what_is_done_is_not_run_again(runs: Runs) -> None:
    jobs = runs.final()
    assert all(job.complete() for job in jobs)
    stamps = [path.stat().st_mtime for job in jobs for path in job.histories()]
    execute(jobs, 1, QUIET)
    assert stamps == [path.stat().st_mtime for job in jobs for path in job.histories()]
    assert not Runs(study(base=IMAGES | {"rounds": 10}), runs.place).final()[0].complete()


def test_only_the_runs_of_a_study_are_counted(runs: Runs, tmp_path: Path) -> None:
    """The directory may hold runs of other studies; each run counts once, although tuning and the end share it."""
    shutil.copytree(runs.place, tmp_path / "runs")
    here = Runs(study(), tmp_path / "runs")
    files = {file for job in here.jobs() for file in job.histories()}
    assert (
        len(files) == 6
    )  # three points on the first seed, one of them again on the second, and two seeds of SSF
    whole = sum(history.read(file)[1][-1]["seconds"] for file in files)
    assert seconds(here.jobs()) == pytest.approx(whole)
    shutil.copytree(here.jobs()[0].run_dir, tmp_path / "runs" / "other" / "seed-0")
    assert seconds(here.jobs() + here.jobs()) == pytest.approx(whole)


def test_missing_runs_and_metrics_are_named(runs: Runs, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="run the comparison again"):
        Runs(study(), tmp_path).final()
    with pytest.raises(SpecError, match="no metric 'f1'; it has loss, accuracy"):
        Runs(study(metric="f1"), runs.place).final()
    with pytest.raises(SpecError, match="no variants"):
        study(variants=[])


def test_tables_laid_over_tables() -> None:
    base = {"a": 1, "method": {"name": "ssf", "rank": 0.2}, "task": {"x": 1, "y": 2}}
    assert laid_over(base, {"task": {"y": 3}})["task"] == {"x": 1, "y": 3}
    assert laid_over(base, {"method": {"refresh": 5}})["method"] == {
        "name": "ssf",
        "rank": 0.2,
        "refresh": 5,
    }
    assert laid_over(base, {"method": {"name": "ssf", "projector": {}}})["method"] == {
        "name": "ssf",
        "projector": {},
    }
    assert base["task"] == {"x": 1, "y": 2}


def test_names_stand_for_the_values_of_a_row() -> None:
    assert filled({"a": "$het", "b": {"c": "$rank"}, "d": "x"}, {"het": 0.5, "rank": 3}) == {
        "a": 0.5, "b": {"c": 3}, "d": "x",
    }  # fmt: skip
    with pytest.raises(SpecError, match="did you mean 'rank'"):
        filled("$rnk", {"rank": 3})


def test_seeds_of_a_batched_task_are_one_job(tmp_path: Path) -> None:
    table = {"task": SMALL, "method": {"name": "fedavg", "lr": 0.01}}
    spec = (
        study(base=laid_over(IMAGES, table), seeds=3)
        .parts[0]
        .spec(Variant("a", "a", "", {}, {}), {})
    )
    assert [job.seeds for job in jobs_of(spec, tmp_path, 3)] == [3]


# ---- a toy: what is read off a grid, rows, and points chosen in another part

TOY = {"rounds": 60, "eval_every": 2, "task": SMALL, "batch_size": 4, "clients_per_round": 3} | {
    "method": {"name": "fedavg", "local_steps": 3}
}
STEPS = Variant("fedavg", "FedAvg", "#E69F00", {}, {"method.lr": [0.1, 0.03, 0.01]})


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Noisy gradients: a long step is ahead in the first rounds, a shorter one in the end."""
    plain: dict[str, Any] = {"base": TOY, "seeds": 2, "metric": "rel_err", "goal": "min", "tail": 2}
    rows = [Case({"het": 0.0}), Case({"het": 1.0}, variants=["ssf"], target=0.5)]
    het = plain | {"base": laid_over(TOY, {"task": {"het": "$het"}}), "rows": rows}
    ssf = Variant("ssf", "SSF", "#0072B2", {"method": {"name": "ssf", "rank": 0.5}}, {})
    parts = [
        Part(name="comparison", variants=[STEPS], **plain),
        Part(name="search", variants=[STEPS], **het | {"rows": [rows[0], Case({"het": 1.0})]}),
        Part(name="others", variants=[STEPS, ssf], tuned_in="search.fedavg", **het),
    ]
    found = Runs(Study("toy", parts), tmp_path_factory.mktemp("toy"))
    conduct.make_runs(found.study, found.place, jobs=1, console=QUIET)
    return Runs(found.study, found.place)


def test_the_step_that_ends_lowest_is_chosen(toy: Runs) -> None:
    one = cell(toy, STEPS)
    ends = {tried.point["method.lr"]: tried.end.mean for tried in one.tried}
    assert one.point["method.lr"] == min(ends, key=lambda lr: ends[lr]) < 0.1


def test_every_variant_takes_the_point_of_another_part_at_the_same_row(toy: Runs) -> None:
    search, others = toy.study.parts[1:]
    cells = [cell_of(toy, others, row, variant) for row, variant in others.cells()]
    assert [(one.row.values["het"], one.variant.name) for one in cells] == [
        (0.0, "fedavg"),
        (0.0, "ssf"),
        (1.0, "ssf"),
    ]
    for one in cells:
        same = next(row for row in search.rows if row.values == one.row.values)
        assert one.point == cell_of(toy, search, same, STEPS).point
        assert one.series.spec["task"]["het"] == one.row.values["het"]
        assert one.tried == []


def test_the_cost_of_a_level(toy: Runs) -> None:
    others = toy.study.parts[2]
    one = cell_of(toy, others, others.rows[1], others.variants[1])
    curve, found = one.curve, one.reached
    assert found is not None
    place = list(curve.rounds).index(found[0])
    assert curve.values.mean(0)[place] < 0.5 <= curve.values.mean(0)[place - 1]
    assert found[1:] == [
        curve.spent["up"][place],
        curve.spent["up"][place] + curve.spent["down"][place],
    ]
    never = dataclasses.replace(others.rows[1], target=1e-9)
    part = dataclasses.replace(others, rows=[others.rows[0], never])
    again = Runs(Study("toy", [toy.study.parts[1], part]), toy.place)
    assert cell_of(again, part, never, one.variant).reached is None
