"""`fedspan compare`: what is run, what becomes of runs that fail, and what is written."""

from __future__ import annotations

import csv
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_run import fedspan as command_line

from conftest import SMALL
from fedspan.api import spec as experiment
from fedspan.core.errors import SpecError
from fedspan.engine.run_dir import toml
from fedspan.study import command, pool, report, tables
from fedspan.study.outcome import Outcome
from fedspan.study.plan import Comparison, folder_of
from fedspan.study.request import requested

QUIET = Console(quiet=True)
GAUSSIAN = {"name": "gaussian", "rank": 3}
BASE: dict[str, Any] = {
    "rounds": 12,
    "eval_every": 2,
    "method": {"name": "ssf", "lr": 0.02, "local_steps": 2, "momentum": 0.5, "projector": GAUSSIAN},
    "task": SMALL,
    "participation": {"clients_per_round": 3},
}


def spec_file(place: Path, name: str = "base.toml", **changes: Any) -> Path:
    path = place / name
    path.write_text(toml(BASE | changes))
    return path


def carry(plan: Comparison, out: Path, resume: bool = False, **more: Any) -> Outcome:
    return command.compare(
        plan, out, resume=resume, line="", console=QUIET, **{"jobs": 1, "formats": ["md", "csv"]} | more
    )


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
    from fedspan.cli import app as cli

    asked = ["compare", str(spec_file(tmp_path)), "--methods", "nobody", "--out", str(tmp_path / "o")]
    monkeypatch.setattr(sys, "argv", ["fedspan", *asked])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("error: `method` must be one of")
    assert not (tmp_path / "o").exists()
