"""`fedspan compare`: what is asked for, what is run, what becomes of runs that fail, and what is written."""

from __future__ import annotations

import csv
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from conftest import SMALL
from fedspan import experiment
from fedspan.compare import command, pool, report, tables
from fedspan.compare.outcome import Outcome
from fedspan.compare.plan import Comparison, folder_of
from fedspan.compare.request import entries, requested, split
from fedspan.core.errors import SpecError
from fedspan.runtimes.folder import toml
from test_run import fedspan as command_line

QUIET = Console(quiet=True)
GAUSSIAN = {"name": "gaussian", "rank": 3}
BASE: dict[str, Any] = {
    "rounds": 12,
    "eval_every": 2,
    "method": {"name": "ssf", "lr": 0.02, "local_steps": 2, "momentum": 0.5, "projector": GAUSSIAN},
    "task": SMALL,
    "participation": {"per_round": 3},
}


def spec_file(place: Path, name: str = "base.toml", **changes: Any) -> Path:
    path = place / name
    path.write_text(toml(BASE | changes))
    return path


def carry(plan: Comparison, out: Path, resume: bool = False, **more: Any) -> Outcome:
    return command.compare(
        plan, out, resume=resume, line="", console=QUIET, **{"jobs": 1, "formats": ["md", "csv"]} | more
    )


# ---- what is asked for


def test_a_list_of_methods_with_settings() -> None:
    assert entries("fedavg,ssf:rank=0.05,control=paper as SSF small,scaffold") == [
        "fedavg",
        "ssf:rank=0.05,control=paper as SSF small",
        "scaffold",
    ]
    assert split('a=[1, 2], b={x = "p,q", y = 3},c') == ["a=[1, 2]", 'b={x = "p,q", y = 3}', "c"]


def test_methods_take_steps_and_subspace_of_the_base(tmp_path: Path) -> None:
    plan = requested(
        [spec_file(tmp_path)], methods=["fedavg, ssf, ssf:rank=0.25,control=paper as Small, fedsub:projector.rank=5"]
    )
    assert [v.name for v in plan.variants] == ["fedavg", "ssf", "ssf-2", "fedsub"]
    assert [v.label for v in plan.variants] == ["fedavg", "ssf", "Small", "fedsub, rank 5"]
    fedavg, ssf, small, fedsub = (plan.spec(v, {}).table()["method"] for v in plan.variants)
    assert (fedavg["lr"], fedavg["local_steps"], fedavg["momentum"]) == (0.02, 2, 0.5)
    assert ssf == experiment.Spec.from_table(BASE).table()["method"]
    assert small["projector"] == {"name": "coordinate", "rank": 0.25}
    assert small["control"] == "paper"
    assert fedsub["projector"] == {"name": "gaussian", "rank": 5}
    assert (plan.metric, plan.goal, plan.seeds, plan.tail) == ("rel_err", "min", 3, 1)


def test_grids_for_all_and_for_one(tmp_path: Path) -> None:
    plan = requested(
        [spec_file(tmp_path)],
        methods=["fedavg,ssf,ssf:control=paper as Paper"],
        grids=["ssf:refresh=1,5", "Paper:lr=0.5", "method.lr=0.01,0.1"],
    )
    assert [v.grid for v in plan.variants] == [
        {"method.lr": [0.01, 0.1]},
        {"method.refresh": [1, 5], "method.lr": [0.01, 0.1]},
        {"method.refresh": [1, 5], "method.lr": [0.5]},
    ]


def test_a_grid_of_ranks_takes_the_place_of_a_projector(tmp_path: Path) -> None:
    plan = requested([spec_file(tmp_path)], methods=["ssf,fedavg"], grids=["ssf:rank=0.25,0.5"])
    ssf = plan.variants[0]
    found = [plan.spec(ssf, point).table()["method"]["projector"] for point in ssf.points()]
    assert found == [{"name": "coordinate", "rank": rank} for rank in (0.25, 0.5)]


def test_local_work_is_each_spec_files_own(tmp_path: Path) -> None:
    one, two = spec_file(tmp_path, epochs=1.0), spec_file(tmp_path, "two.toml", method={"name": "fedavg", "lr": 0.1})
    plan = requested([one, two])
    assert [plan.spec(v, {}).epochs for v in plan.variants] == [1.0, None]


def test_spec_files_of_one_task(tmp_path: Path) -> None:
    one = spec_file(tmp_path)
    two = spec_file(tmp_path, "two.toml", method=BASE["method"] | {"control": "paper"})
    three = spec_file(tmp_path, "three.toml", method={"name": "fedavg", "lr": 0.1}, rounds=50)
    plan = requested([one, two, three], budget=["up=3kB"], seeds=1)
    assert [v.label for v in plan.variants] == ["ssf, control exact", "ssf, control paper", "fedavg"]
    assert [plan.spec(v, {}).rounds for v in plan.variants] == [20, 13, 10]
    with pytest.raises(SpecError, match=r"rounds is 12 in '.*base.toml' and 50 in '.*three.toml'; .* --set rounds"):
        requested([one, three])
    assert len(requested([one, three], changes=["rounds=9"]).variants) == 2
    with pytest.raises(SpecError, match=r"task.het is 1.0 in .* and 0.5 in"):
        requested([one, spec_file(tmp_path, "other.toml", task=SMALL | {"het": 0.5})])
    with pytest.raises(SpecError, match="two methods are both called 'ssf'"):
        requested([one, spec_file(tmp_path, "same.toml")])


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown method": ({"methods": ["fedavgg"]}, "did you mean 'fedavg'?"),
    "unknown setting": ({"methods": ["ssf:contrl=paper"]}, "did you mean 'control'?"),
    "no value": ({"methods": ["ssf:control"]}, "written name:key=value,key=value"),
    "grid without values": ({"grids": ["lr"]}, "--grid needs key=value"),
    "grid of nobody": ({"grids": ["fedavg:lr=1"]}, "is for 'fedavg', which is not compared; one of ssf"),
    "grid of the task": ({"grids": ["task.het=1,2"]}, "'task.het' is not part of it"),
    "grid of another's key": ({"methods": ["ssf,fedavg"], "grids": ["refresh=1,2"]}, "`key of [spec.method]` must be"),
    "bad value": ({"grids": ["lr=0.1,-1"]}, "`lr` must be a positive number, got -1"),
    "metric": ({"metric": "accuracy"}, "`metric` must be one of loss, rel_err, got 'accuracy'"),
    "seeds": ({"seeds": 0}, "`seeds` must be a whole number of at least 1"),
    "rank over d": ({"grids": ["projector.rank=3,20"]}, "`rank` 20 is larger than the 12 inputs of block 'X'"),
    "small budget": ({"budget": ["up=10B"]}, "less than one round of 'ssf'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_before_anything_runs(name: str, tmp_path: Path) -> None:
    asked, words = MISTAKES[name]
    with pytest.raises(SpecError) as error:
        requested([spec_file(tmp_path)], **asked)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_comparison_is_a_file(tmp_path: Path) -> None:
    plan = requested(
        [spec_file(tmp_path)],
        methods=["fedavg,ssf:rank=0.5"],
        grids=["lr=0.01,0.02"],
        budget=["up=2kB", "rounds=30"],
        tune_rounds=4,
        metric="loss",
    )
    path = tmp_path / "plan.toml"
    path.write_text(toml(plan.to_table()))
    again = requested([path])
    assert again == plan
    assert requested([path], metric="rel_err", goal="max", seeds=1).goal == "max"
    assert requested([path], changes=["task.het=0.0"]).base["task"]["het"] == 0.0
    with pytest.raises(SpecError, match="is a whole comparison"):
        requested([path], methods=["fedavg"])
    for broken, words in (
        ("seed = 1\n", "did you mean 'seeds'"),
        ("[variants.a]\nlable = 'x'\n", "did you mean 'label'"),
    ):
        path.write_text(broken + "[variants.b]\n[base]\n")
        with pytest.raises(SpecError, match=words):
            requested([path])


# ---- what is run


def no_room(real: Any) -> Any:
    """`experiment.run`, but for one step size that this machine cannot bear."""

    def run(spec: experiment.Spec, *rest: Any, **options: Any) -> Any:
        if spec.method.lr == 0.07:
            raise MemoryError("no\nroom")
        return real(spec, *rest, **options)

    return run


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Comparison, Path, Outcome]:
    """Four methods at equal uplink: one to be tuned, one that diverges, one of whose points cannot run."""
    place = tmp_path_factory.mktemp("done")
    plan = requested(
        [spec_file(place)],
        methods=["fedavg,ssf,fedavg:lr=50.0,momentum=0.0 as Too far,subavg"],
        grids=["fedavg:lr=0.001,0.02,40.0", "Too far:lr=50.0", "subavg:lr=0.02,0.07"],
        budget=["up=3kB"],
        seeds=2,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "run", no_room(experiment.run))
        return plan, place / "out", carry(plan, place / "out")


def test_runs_are_as_long_as_the_budget(done: tuple[Comparison, Path, Outcome]) -> None:
    plan, _, outcome = done
    assert outcome.chosen()["fedavg"] == {"method.lr": 0.02}
    assert [outcome.curve(v).rounds[-1] for v in plan.variants] == [10, 20, 2, 41]
    for variant in plan.variants:
        sent = outcome.curve(variant).up
        assert sent[-1] <= 3000
        assert variant.label == "Too far" or sent[-1] + sent[1] / 2 > 3000
    header, rows = tables.main(outcome)
    assert header[2] == "rel_err at 3 kB up"
    assert [row[0] for row in rows if row[2] == "diverged"] == ["Too far"]


def test_what_fails_is_a_result(done: tuple[Comparison, Path, Outcome]) -> None:
    plan, out, outcome = done
    tried = {trial.point["method.lr"]: trial.end for trial in outcome.trials(plan.variants[3])}
    assert tried[0.07].text("", "") == "failed"
    assert tried[0.02].whole
    assert outcome.failures() == ["subavg, lr 0.07: MemoryError: no room"]
    assert "failed: subavg" in (out / "results.md").read_text()
    (folder,) = [path.parent for path in out.rglob(pool.FAILED)]
    assert "Traceback" in (folder / pool.FAILED).read_text()


def test_tables_are_written(done: tuple[Comparison, Path, Outcome]) -> None:
    plan, out, outcome = done
    lines = list(csv.DictReader((out / "results.csv").read_text().splitlines()))
    assert [line["run"] for line in lines] == [v.label for v in plan.variants]
    assert float(lines[1]["result_mean"]) == pytest.approx(outcome.final(plan.variants[1]).mean, rel=1e-5)
    assert (lines[2]["diverged"], lines[2]["result_mean"]) == ("2", "")
    assert lines[1]["client_state_bytes"] == str(24 * 4)
    curves = list(csv.DictReader((out / "curves.csv").read_text().splitlines()))
    assert len([line for line in curves if line["run"] == "ssf"]) == 2 * 11
    assert tomllib.loads((out / "comparison.toml").read_text())["variants"]["fedavg"]["grid"]
    assert "| fedavg | lr 0.02 |" in (out / "results.md").read_text()


def test_it_goes_on_where_it_was(done: tuple[Comparison, Path, Outcome], tmp_path: Path) -> None:
    """A second call needs --resume, runs nothing again, and may ask for more."""
    plan, out, _ = done
    with pytest.raises(SpecError, match="already holds a comparison; add --resume"):
        carry(plan, out)
    shutil.copytree(out, tmp_path / "again")
    runs = tmp_path / "again" / "runs"
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("history.jsonl")}
    more = requested([tmp_path / "again" / "comparison.toml"], grids=["ssf:lr=0.02,0.05"], budget=["up=3kB"])
    carry(more, tmp_path / "again", resume=True)
    after = {path: path.stat().st_mtime_ns for path in runs.rglob("history.jsonl")}
    assert {path: after[path] for path in before} == before
    assert len(after) > len(before)


def test_a_comparison_under_way_is_shown_as_the_runs_it_has(
    done: tuple[Comparison, Path, Outcome], tmp_path: Path
) -> None:
    _, out, _ = done
    shutil.copytree(out, tmp_path / "half")
    for place in (tmp_path / "half" / "runs").glob("ssf-*"):
        shutil.rmtree(place)
    report.report([tmp_path / "half"], tmp_path / "shown", ["md", "csv"], None, "")
    text = (tmp_path / "shown" / "results.md").read_text()
    assert "| fedavg, lr 0.001" in text
    assert "| ssf" not in text


def test_a_run_cut_short_is_taken_up(done: tuple[Comparison, Path, Outcome], tmp_path: Path) -> None:
    plan, out, outcome = done
    shutil.copytree(out, tmp_path / "cut")
    variant = plan.variants[1]
    spec = plan.spec(variant, {})
    folder = folder_of(spec, tmp_path / "cut" / "runs") / "2-seeds"
    shutil.rmtree(folder)
    experiment.run(experiment.dataclasses.replace(spec, rounds=6), folder, seeds=2)
    again = carry(plan, tmp_path / "cut", resume=True)
    assert again.final(variant) == outcome.final(variant)


STUMBLES = """
from dataclasses import dataclass
from fedspan import register
from fedspan.methods.fedavg import FedAvg

@register
@dataclass(frozen=True, kw_only=True)
class Stumbles(FedAvg):
    def client_step(self, client, down, f, rnd):
        if rnd.t == 5:
            raise RuntimeError("stumbled")
        return super().client_step(client, down, f, rnd)
"""


def test_several_processes_with_a_method_of_ones_own(tmp_path: Path) -> None:
    """The numbers of one process; a plugin is known in all of them, and that it fails does not matter to the others."""
    (tmp_path / "stumbles.py").write_text(STUMBLES)
    asked = ["--methods", "fedavg,stumbles", "--seeds", 2, "--format", "csv", "--plugin", tmp_path / "stumbles.py"]
    done = command_line("compare", spec_file(tmp_path), *asked, "--jobs", 2, "--out", tmp_path / "two")
    assert done.returncode == 0, done.stderr
    assert "failed: RuntimeError: stumbled" in done.stdout
    carry(requested([spec_file(tmp_path)], methods=["fedavg"], seeds=2), tmp_path / "one")
    one, two = (csv.DictReader((tmp_path / jobs / "curves.csv").read_text().splitlines()) for jobs in ("one", "two"))
    assert [row | {"seconds": ""} for row in one] == [row | {"seconds": ""} for row in two]
    results = csv.DictReader((tmp_path / "two" / "results.csv").read_text().splitlines())
    assert [(row["run"], row["failed"]) for row in results] == [("fedavg", "0"), ("stumbles", "2")]


def test_a_mistake_on_the_command_line_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from fedspan import cli

    asked = ["compare", str(spec_file(tmp_path)), "--methods", "nobody", "--out", str(tmp_path / "o")]
    monkeypatch.setattr(sys, "argv", ["fedspan", *asked])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("error: `method` must be one of")
    assert not (tmp_path / "o").exists()
