"""`fedspan report --verify`: a recorded run is made again, and a number that was changed in the record is found."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import fedspan
from fedspan.api.run import run
from fedspan.cli.app import app
from fedspan.core.errors import SpecError
from fedspan.core.json_log import JsonLog, read_lines
from fedspan.core.spec import Spec
from fedspan.engine import history
from fedspan.methods.fedavg import FedAvg
from fedspan.study.results import CURVES
from fedspan.study.verify import verify
from support.comparisons import spec_file
from support.runs import TABLE


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison with a grid, and with a method whose step size is searched."""
    place = tmp_path_factory.mktemp("compared")
    words = ["compare", str(spec_file(place)), "--methods", "fedavg,ssf as SSF", "--seeds", "2"]
    grids = ["--grid", "fedavg:lr=0.01,0.02", "--grid", "SSF:lr=search", "--set", "rounds=6"]
    made = CliRunner().invoke(app, [*words, *grids, "--out", str(place / "out")])
    assert made.exit_code == 0, made.output
    return place / "out"


def changed(path: Path, key: str, factor: float) -> None:
    """Change a value of the last evaluation of a history, with checksums as a forger would write them."""
    lines, _ = read_lines(path)
    lines[-1][key] *= factor
    path.unlink()
    JsonLog(path, lines, {}, path.name)


def test_every_run_of_a_comparison_comes_out_again(compared: Path) -> None:
    names = {path.parent.relative_to(compared) for path in compared.rglob(history.NAME)}
    assert len(names) > 3
    for name in names:
        text, same = verify(compared, str(name))
        assert same, text
        assert "bit for bit" in text


def test_the_data_of_a_study_without_its_runs_too(compared: Path, tmp_path: Path) -> None:
    for path in compared.iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path)
    for name in ("comparison/fedavg/seed-1", "comparison/SSF/seed-0"):
        text, same = verify(tmp_path, name)
        assert same, text
    data = json.loads(gzip.decompress((tmp_path / CURVES).read_bytes()))
    for one in data["runs"]:
        one["metrics"]["rel_err"][1][-1] *= 1 + 1e-4
    (tmp_path / CURVES).write_bytes(gzip.compress(json.dumps(data).encode()))
    text, same = verify(tmp_path, "comparison/fedavg/seed-1")
    assert not same
    assert "most in rel_err after round 6" in text
    assert verify(tmp_path, "comparison/fedavg/seed-0")[1]


@pytest.mark.parametrize(
    ("key", "factor"), [("rel_err", 1 + 1e-15), ("up_bytes", 2), ("down_bytes", 3)]
)
def test_a_changed_number_is_found(key: str, factor: float, tmp_path: Path) -> None:
    run(Spec.from_table(TABLE), tmp_path / "a", progress=False)
    assert verify(tmp_path / "a")[1]
    changed(tmp_path / "a" / history.NAME, key, factor)
    text, same = verify(tmp_path / "a")
    assert not same
    assert f"differs in 1 evaluations, most in {key} after round 12: recorded" in text


def test_the_command_line_says_which_run_and_has_an_exit_code(tmp_path: Path) -> None:
    run(Spec.from_table(TABLE), tmp_path / "a", seeds=2, progress=False)
    words = ["report", str(tmp_path), "--verify"]
    again = CliRunner().invoke(app, words, standalone_mode=False)
    assert again.return_value == 0, again.output
    found = re.match(r"(a/seed-[01]) \(of 2 runs\): the same in all evaluations", again.output)
    assert found, again.output
    changed(tmp_path / found[1] / history.NAME, "rel_err", 1.5)
    words = ["report", str(tmp_path), "--verify-run", found[1]]
    again = CliRunner().invoke(app, words, standalone_mode=False)
    assert again.return_value == 1
    assert "(33 %)" in again.output
    assert not (tmp_path / "index.html").exists()


def test_a_run_that_was_stopped_is_made_as_far(tmp_path: Path) -> None:
    stopping = {"name": "early_stopping", "patience": 1, "min_delta": 10.0}
    run(Spec.from_table(TABLE | {"callbacks": [stopping]}), tmp_path / "stopped", progress=False)
    run(Spec.from_table(TABLE), tmp_path / "longer", progress=False)
    run(Spec.from_table(TABLE | {"rounds": 17}), tmp_path / "longer", resume=True, progress=False)
    for name in ("stopped", "longer"):
        text, same = verify(tmp_path, name)
        assert same, text


def test_what_no_spec_can_say_is_refused(tmp_path: Path) -> None:
    x, y = torch.randn(8, 2), torch.randn(8, 1)
    model = torch.nn.Linear(2, 1)
    settings = {"rounds": 1, "progress": False, "run_dir": tmp_path / "fit"}
    fedspan.fit(model, [(x, y), (x, y)], torch.nn.MSELoss(), method=FedAvg(lr=0.1), **settings)
    with pytest.raises(SpecError, match=r"no run of .* can be made again from its spec"):
        verify(tmp_path)
    with pytest.raises(SpecError, match=r"--verify-run.*fit"):
        verify(tmp_path, "fi")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SpecError, match="holds no runs"):
        verify(tmp_path / "empty")


def test_a_run_with_two_learning_rates_is_refused(tmp_path: Path) -> None:
    run(Spec.from_table(TABLE), tmp_path / "a", progress=False)
    slower = TABLE | {"rounds": 17, "method": TABLE["method"] | {"lr": 0.01}}
    run(Spec.from_table(slower), tmp_path / "a", resume=True, progress=False)
    with pytest.raises(SpecError, match="it was continued with another learning rate"):
        verify(tmp_path / "a")
