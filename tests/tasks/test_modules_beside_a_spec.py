"""`task.module` and `task.model` are found beside the spec file, without PYTHONPATH, in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fedspan
from fedspan.core.errors import SpecError
from fedspan.core.spec import Spec

MODULE = """
import torch
from my_numbers import SHIFT

def model():
    return torch.nn.Linear(3, 2)

def data(client):
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(client))
    return x, (x[:, 0] > SHIFT).long()

def test():
    return data(99)
"""
SPEC = """
rounds = 3
[method]
name = "fedavg"
lr = 0.5
local_steps = 4
[task]
name = "custom"
module = "my_data"
clients = 3
"""


def project(place: Path, shift: float = 0.0) -> Path:
    place.mkdir()
    (place / "my_data.py").write_text(MODULE)
    (place / "my_numbers.py").write_text(f"SHIFT = {shift}\n")
    (place / "spec.toml").write_text(SPEC)
    return place / "spec.toml"


def command(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env["PYTHONPATH"] = str(Path(fedspan.__file__).parents[1])
    line = [sys.executable, "-m", "fedspan", *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, cwd=cwd, env=env, check=False)


@pytest.mark.slow
def test_the_command_line_finds_the_module(tmp_path: Path) -> None:
    path = project(tmp_path / "project")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for words in (
        ("run", path, "--run-dir", "run"),
        ("run", path, "--set", "engine.simulate=pool", "--set", "engine.workers=2"),
        ("run", "run/spec.toml"),
        ("plan", path),
        ("partition", path),
        ("compare", path, "--methods", "fedavg,scaffold", "--out", "out", "--jobs", "2"),
    ):
        done = command(*words, cwd=elsewhere)
        assert done.returncode == 0, f"{words}: {done.stderr}"


def test_two_projects_have_modules_of_one_name(tmp_path: Path) -> None:
    """Each run uses its own, and the path is as it was afterwards."""
    one, two = project(tmp_path / "one"), project(tmp_path / "two", shift=0.8)
    before = list(sys.path)

    def of_class_one(path: Path) -> int:
        clients = Spec.load(path).task.material(0, torch.float32).clients
        return sum(int((y == 1).sum()) for _, y in clients)

    assert of_class_one(one) == of_class_one(one)
    assert of_class_one(two) < of_class_one(one)
    assert sys.path == before


def test_a_file_is_relative_to_the_spec_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = project(tmp_path / "project")
    (tmp_path / "project/my_data.py").write_text(
        MODULE.replace("from my_numbers import SHIFT", "SHIFT = 0")
    )
    path.write_text(SPEC.replace('"my_data"', '"my_data.py"'))
    monkeypatch.chdir(tmp_path)
    assert fedspan.run("project/spec.toml").history[-1]["accuracy"] > 0.8
    moved = Spec.load(path)
    path.write_text(SPEC.replace('"my_data"', '"no_data"'))
    with pytest.raises(SpecError, match=r"`task.module` 'no_data' cannot be imported"):
        fedspan.run(path)
    assert moved.identity() == Spec.from_table(moved.table()).identity()
