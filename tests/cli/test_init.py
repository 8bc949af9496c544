"""`fedspan init`: every kind of project runs at once, in the simulator and on Flower, and takes one's own data."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import fedspan
from fedspan.cli import app
from fedspan.cli.init import project
from fedspan.core.errors import FedspanError, SpecError
from fedspan.core.spec import Spec
from support.commands import main

ROOT = Path(__file__).parents[2]
KINDS = ("tabular", "custom")
ENV = os.environ | {"PYTHONPATH": str(Path(fedspan.__file__).parents[1]), "OMP_NUM_THREADS": "1"}


def python(*words: object, cwd: Path, **more: str) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=ENV | more,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def init(place: Path, kind: str) -> Path:
    """`fedspan init`, in this process; the path of the spec."""
    done = CliRunner().invoke(app.app, ["init", str(place), "--kind", kind])
    assert done.exit_code == 0, done.output
    assert "fedspan run spec.toml" in done.output
    return place / "spec.toml"


def test_the_tests_of_a_project_are_named_where_pytest_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = CliRunner().invoke(app.app, ["init", str(tmp_path / "ours")]).output
    assert "python -m pytest" in said
    find = PathFinder.find_spec
    monkeypatch.setattr(
        PathFinder, "find_spec", lambda name, *rest: None if name == "pytest" else find(name, *rest)
    )
    assert (
        "python -m pytest"
        not in CliRunner().invoke(app.app, ["init", str(tmp_path / "mine")]).output
    )


def test_the_tests_of_the_projects_pass(tmp_path: Path) -> None:
    """Those of all kinds in one process."""
    places = [init(tmp_path / f"our-{kind}", kind).parent for kind in KINDS]
    found = os.pathsep.join([ENV["PYTHONPATH"], *map(str, places)])
    said = python("-m", "pytest", "-q", *places, cwd=tmp_path, PYTHONPATH=found)
    assert f"{2 * len(places)} passed" in said


@pytest.mark.parametrize("kind", KINDS)
def test_a_project_runs_at_once(kind: str, tmp_path: Path) -> None:
    """A short run, its clients, and no name of the template left."""
    path = init(tmp_path / "our-model", kind)
    spec = Spec.load(path)
    assert len(spec.task.holdings(0).counts) == 5
    result = fedspan.run(spec)
    assert result.history[-1].get("accuracy", 1 - result.history[-1].get("mae", 0)) > 0.7
    texts = [
        one.read_text() for one in path.parent.rglob("*") if one.suffix in (".py", ".toml", ".md")
    ]
    assert all("my_project" not in text.lower() and "DATA_SECTION" not in text for text in texts)
    own_module = 'module = "our_model.task"' in path.read_text()
    assert own_module == (path.parent / "our_model/task.py").is_file() == (kind != "tabular")


def test_the_commands_of_a_projects_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = init(tmp_path / "wards", "tabular")
    monkeypatch.chdir(path.parent)
    lines = re.findall(r"^    (fedspan .*)$", (path.parent / "README.md").read_text(), re.M)
    assert [line.split()[1] for line in lines] == ["run", "predict", "compare", "partition"]
    for line in lines:
        more = ["--set", "rounds=2"] if line.split()[1] in ("run", "compare") else []
        done = CliRunner().invoke(app.app, [*shlex.split(line)[1:], *more])
        assert done.exit_code == 0, done.output
        if line.split()[1] == "run":  # it says what becomes of each column
            assert "left out: patient" in done.output
            assert "categories: ward (" in done.output
            assert "with empty cells" in done.output
    assert (path.parent / "runs/compare/tables.md").is_file()
    assert len((path.parent / "predictions.csv").read_text().splitlines()) == 121


def npz_files(place: Path, parts: list[str]) -> None:
    for number, part in enumerate(parts):
        x = np.random.default_rng(number).normal(size=(20, 8))
        np.savez(place / f"{part}.npz", x=x, y=x[:, :1])


def test_a_project_takes_the_data_that_its_readme_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = Spec.load(init(tmp_path / "wards", "custom"), ("rounds=2",))
    own = tmp_path / "own"
    own.mkdir()
    npz_files(own, [*(f"client-{number}" for number in range(5)), "test"])
    monkeypatch.setenv("WARDS_DATA", str(own))
    assert fedspan.run(spec).finished
    assert spec.task.holdings(0).counts.sum() == 100
    readme = (tmp_path / "wards/README.md").read_text()
    assert "client-0" in readme
    assert "WARDS_DATA" in readme


def test_own_tables_of_any_scale_are_learned(tmp_path: Path) -> None:
    """Columns as in a clinic: ages of about 60, doses of about 300; the majority class has 60 to 70 %."""
    path = init(tmp_path / "clinics", "tabular")
    for old in (path.parent / "data").glob("*.csv"):
        old.unlink()
    for number, part in enumerate(("here", "there", "beyond")):
        rng = np.random.default_rng(number)
        x = np.column_stack(
            [rng.normal(60, 10, 200), rng.normal(300, 80, 200), rng.normal(1, 0.2, 200)]
        )
        rows = np.column_stack([x, (x[:, 0] - 60) / 10 - (x[:, 1] - 300) / 80 > 0.6])
        np.savetxt(
            path.parent / f"data/{part}.csv",
            rows,
            delimiter=",",
            header="age,dose,ratio,ill",
            comments="",
            fmt="%g",
        )
    path.write_text(
        path.read_text().replace('"readmitted"', '"ill"').replace("clients = 5", "clients = 3")
    )
    majority = max(np.mean(rows[:, -1]), 1 - np.mean(rows[:, -1]))
    assert majority < 0.75
    result = fedspan.run(path, progress=False)
    assert result.history[-1]["accuracy"] > 0.9
    assert {row["client"] for row in result.per_client} == {"here", "there", "beyond"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"patient,age\n1,60\n", "'north' has no column 'readmitted'; it has patient, age"),
        (b"age,readmitted\nold,yes\n60,no\n61,no\n", "column 'age' has numbers but 'old'"),
        (b"age,readmitted\n\xe9,no\n", "north.csv.*UTF-8"),
    ],
)
def test_a_wrong_table_of_a_project_is_named(content: bytes, words: str, tmp_path: Path) -> None:
    path = init(tmp_path / "wrong", "tabular")
    (path.parent / "data/north.csv").write_bytes(content)
    with pytest.raises(FedspanError, match=words):
        fedspan.run(path, progress=False)


def test_the_number_of_tables_is_that_of_the_spec(tmp_path: Path) -> None:
    path = init(tmp_path / "fewer", "tabular")
    (path.parent / "data/north.csv").unlink()
    with pytest.raises(FedspanError, match="clients"):
        fedspan.run(path, progress=False)


def test_the_sample_tables_are_always_the_same() -> None:
    assert project("wards", "tabular") == project("wards", "tabular")
    held = [text for path, text in project("wards", "tabular").items() if path.endswith(".csv")]
    assert [len(text.splitlines()) for text in held] == [121] * 5


def test_a_wrong_file_of_a_project_is_named(tmp_path: Path) -> None:
    path = init(tmp_path / "named", "custom")
    (path.parent / "data").mkdir()
    (path.parent / "data" / "client-0.npz").write_bytes(b"no archive")
    words = r"data\(\) fails in line .* of task.py: .*client-0.npz must have the arrays x and y"
    with pytest.raises(SpecError, match=words):
        fedspan.run(path, progress=False)


def test_nothing_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "wards").mkdir()
    (tmp_path / "wards/notes.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    for name, message in (("wards", "is not empty"), ("Wards 1", "`NAME` must be a Python name")):
        assert main(monkeypatch, "init", name) == 2
        assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["wards", "notes.txt"]
    (tmp_path / "empty").mkdir()
    assert init(tmp_path / "empty", "custom").is_file()


def test_the_run_config_is_that_of_the_flower_example() -> None:
    ours = tomllib.loads(project("wards", "tabular")["pyproject.toml"])["tool"]["flwr"]["app"][
        "config"
    ]
    example = tomllib.loads((ROOT / "examples/flower/pyproject.toml").read_text())["tool"]["flwr"][
        "app"
    ]["config"]
    assert ours | {"run-dir": ""} == example


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tabular"])
def test_a_project_runs_on_flower(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="Flower is not installed; pip install 'fedspan[flower]'")
    sys.path.insert(0, str(ROOT / "examples/flower"))
    from cluster import Cluster

    init(tmp_path / "wards", kind)
    tables = sorted((tmp_path / "wards/data").glob("*.csv"))
    with Cluster(tmp_path / "cluster", nodes=5, data=tables) as cluster:
        number = cluster.run(
            tmp_path / "wards", run_dir=str(tmp_path / "run"), set="rounds=2; eval_every=1"
        )
        status = cluster.wait(number, 300)
        assert status["status"] == "finished:completed", status
    assert cluster.living() == []
    here = fedspan.run(
        fedspan.Spec.load(tmp_path / "wards/spec.toml", ("rounds=2", "eval_every=1"))
    )
    there = [
        json.loads(line) for line in (tmp_path / "run/history.jsonl").read_text().splitlines()
    ][-1]
    for name in ("clients_loss", "worst_auroc"):
        assert there[name] == pytest.approx(here.history[-1][name], rel=1e-4)
