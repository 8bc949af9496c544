"""`fedspan compare`: what is run, what becomes of runs that fail, and what is written."""

from __future__ import annotations

import csv
import dataclasses
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fedspan.api.run import run
from fedspan.cli.app import app
from fedspan.core.errors import SpecError
from fedspan.core.spec import Spec
from fedspan.engine import history
from fedspan.engine.provenance import CHECKPOINT
from fedspan.study import conduct, execute, jobs, report, tables
from fedspan.study.model import Study
from fedspan.study.request import requested
from fedspan.study.results import Results, load
from support.comparisons import spec_file

QUIET = Console(quiet=True)


def carry(study: Study, out: Path, resume: bool = False, **more: Any) -> Results:
    options: dict[str, Any] = {"jobs": 1, "formats": ["md", "csv"]} | more
    return conduct.conduct(study, out, resume=resume, line="", console=QUIET, **options)


def too_large(real: Any) -> Any:
    """`run`, but for one step size that does not fit into memory."""

    def run_(spec: Spec, *rest: Any, **options: Any) -> Any:
        if spec.method.lr == 0.07:
            raise MemoryError("no\nroom")
        return real(spec, *rest, **options)

    return run_


Done = tuple[Study, Path, Results]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Four methods at equal uplink: one to be tuned, one that diverges, one of whose points cannot run."""
    place = tmp_path_factory.mktemp("done")
    study = requested(
        spec_file(place),
        methods=["fedavg,ssf,fedavg:lr=50.0,local.momentum=0.0 as Too far,subavg"],
        grids=["fedavg:lr=0.001,0.02,40.0", "Too far:lr=50.0", "subavg:lr=0.02,0.07"],
        budget=["up=3kB"],
        seeds=2,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execute, "run", too_large(execute.run))
        return study, place / "out", carry(study, place / "out")


def test_runs_are_as_long_as_the_budget(done: Done) -> None:
    study, _, results = done
    (part,), entries = study.parts, results.entries["comparison"]
    assert entries[0].point == {"method.lr": 0.02}
    assert [entry.curve(part).rounds[-1] for entry in entries] == [10, 20, 2, 41]
    for entry in entries:
        sent = entry.curve(part).spent["up"]
        assert sent[-1] <= 3000
        assert entry.series.label == "Too far" or sent[-1] + sent[1] / 2 > 3000
    grid = tables.results(part, entries)
    assert grid.header[2] == "relative error at 3 kB up"
    assert [row[0] for row in grid.rows if row[2] == "diverged"] == ["Too far"]


def test_a_failure_is_a_result(done: Done) -> None:
    _, out, results = done
    entry = results.entries["comparison"][3]
    tried = {one.point["method.lr"]: one.end for one in entry.tried}
    assert tried[0.07].text("", "") == "failed"
    assert tried[0.02].whole
    assert entry.failures == ["subavg, lr 0.07: MemoryError: no room"]
    assert "failed: subavg" in (out / "tables.md").read_text()
    (file,) = out.rglob(jobs.FAILED)
    assert "Traceback" in file.read_text()


def test_tables_are_written(done: Done) -> None:
    study, out, results = done
    lines = list(csv.DictReader((out / "results.csv").read_text().splitlines()))
    assert [line["method"] for line in lines] == [v.label for v in study.parts[0].variants]
    assert float(lines[1]["rel_err"]) == pytest.approx(
        results.entries["comparison"][1].final.mean, rel=1e-5
    )
    assert (lines[2]["diverged"], lines[2]["rel_err"]) == ("2", "nan")
    assert lines[1]["client_state_bytes"] == str(24 * 4)
    assert tomllib.loads((out / "study.toml").read_text())["variants"]["fedavg"]["grid"]
    assert "| fedavg | lr 0.02 |" in (out / "tables.md").read_text()


def test_finished_runs_keep_no_checkpoint(done: Done) -> None:
    _, out, _ = done
    assert list(out.rglob(history.NAME))
    assert not list(out.rglob("checkpoint.safetensors"))


def test_it_is_continued(done: Done, tmp_path: Path) -> None:
    """A second call needs --resume, runs nothing again, and may ask for more."""
    study, out, _ = done
    with pytest.raises(
        SpecError, match="already holds a comparison; continue it with `resume=True`"
    ):
        carry(study, out)
    shutil.copytree(out, tmp_path / "again")
    runs = tmp_path / "again" / "runs"
    before = {path: path.stat().st_mtime_ns for path in runs.rglob(history.NAME)}
    more = requested(
        tmp_path / "again" / "study.toml", grids=["ssf:lr=0.02,0.05"], budget=["up=3kB"]
    )
    carry(more, tmp_path / "again", resume=True)
    after = {path: path.stat().st_mtime_ns for path in runs.rglob(history.NAME)}
    assert {path: after[path] for path in before} == before
    assert len(after) > len(before)


def test_a_comparison_that_is_running_is_shown_as_the_runs_it_has(
    done: Done, tmp_path: Path
) -> None:
    _, out, _ = done
    shutil.copytree(out, tmp_path / "half")
    (tmp_path / "half" / "curves.json.gz").unlink()
    for place in (tmp_path / "half" / "runs").glob("ssf-*"):
        shutil.rmtree(place)
    report.report([tmp_path / "half"], tmp_path / "shown", ["md", "csv"], None, "")
    text = (tmp_path / "shown" / "tables.md").read_text()
    assert "| fedavg, lr 0.001" in text
    assert "| ssf" not in text


def test_a_short_run_is_replaced_by_a_longer_one(done: Done, tmp_path: Path) -> None:
    study, out, results = done
    shutil.copytree(out, tmp_path / "cut")
    (part,) = study.parts
    spec = part.spec(part.variant("ssf"), {})
    (job,) = jobs.jobs_of(spec, tmp_path / "cut" / "runs", 2)
    for keep in (True, False):  # continued from its checkpoint, or run again
        shutil.rmtree(job.run_dir)
        run(dataclasses.replace(spec, rounds=6), job.run_dir, seeds=2)
        if not keep:
            (job.run_dir / CHECKPOINT).unlink()
        assert not job.complete()
        again = carry(study, tmp_path / "cut", resume=True)
        assert again.entries["comparison"][1].final == results.entries["comparison"][1].final


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
    asked = [
        "--methods",
        "fedavg,stumbles",
        "--seeds",
        2,
        "--format",
        "csv",
        "--plugin",
        tmp_path / "stumbles.py",
    ]
    words = ["compare", spec_file(tmp_path), *asked, "--jobs", 2, "--out", tmp_path / "two"]
    line = [sys.executable, "-m", "fedspan", *map(str, words)]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "failed: RuntimeError: stumbled" in done.stdout
    carry(requested(spec_file(tmp_path), methods=["fedavg"], seeds=2), tmp_path / "one")
    one, two = (
        load(tmp_path / jobs).entries["comparison"][0].series.to_json() | {"seconds": []}
        for jobs in ("one", "two")
    )
    assert one == two
    results = csv.DictReader((tmp_path / "two" / "results.csv").read_text().splitlines())
    assert [(row["method"], row["failed"]) for row in results] == [
        ("fedavg", "0"),
        ("stumbles", "2"),
    ]


def test_a_mistake_on_the_command_line_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from fedspan.cli import app as cli

    asked = [
        "compare",
        str(spec_file(tmp_path)),
        "--methods",
        "nobody",
        "--out",
        str(tmp_path / "o"),
    ]
    monkeypatch.setattr(sys, "argv", ["fedspan", *asked])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("error: `method` must be one of")
    assert not (tmp_path / "o").exists()


def test_methods_that_are_not_tuned_are_told_so(tmp_path: Path) -> None:
    """They share the spec's step size; with steps of their own there is nothing to tell."""
    for methods, told in (("fedavg,scaffold", True), ("fedavg:lr=0.01,scaffold", False)):
        out = tmp_path / str(told)
        words = [
            "compare",
            spec_file(tmp_path),
            "--methods",
            methods,
            "--seeds",
            1,
            "--out",
            out,
            "--format",
            "md",
        ]
        said = CliRunner().invoke(app, list(map(str, words)))
        assert said.exit_code == 0, said.output
        assert (
            "Not tuned: every method runs with the lr that is given, 0.02; give --grid"
            in said.output
        ) is told
        assert ("Not tuned" in (out / "tables.md").read_text()) is told
        assert "0.0 core-minutes" not in said.output
