"""Command lines that cannot be followed end in one line and a code, and leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_run_command import main

import fedspan

SPEC = """rounds = 2
batch_size = "full"
method = { name = "fedavg", lr = 0.01 }
task = { name = "regression", dim = 6, clients = 4, samples = 8 }
"""
LONG = "x" * 5000
COMPARE = ("compare", "s.toml", "--methods", "fedavg", "--out")
MISTAKES: list[tuple[tuple[str, ...], str]] = [
    (("run", "s.toml", "--run-dir", ""), "argument 4 is empty"),
    (("run", "s.toml", "--run-dir", LONG), "--run-dir is longer than file names may be"),
    (("run", LONG), "`spec` is longer"),
    (("run", "s.toml", "--set", "device=meta"), "`device`"),
    (("run", "s.toml", "--set", "batch_size=100000000000000000000"), "`batch_size`"),
    (("run", "s.toml", "--set", "task.clients=1000000000"), "memory"),
    (("run", "s.toml", "--set", "engine.states_dir=''"), "states_dir"),
    (("run", "s.toml", "--set", "method.name=FedAvgg"), "did you mean 'fedavg'"),
    (("partition", "s.toml", "--set", "task.clients=100000000000"), "memory"),
    (("diagnose", "s.toml", "--target", "nan"), "`target`"),
    (("report", "nothere"), "'nothere' does not exist; give directories that runs were written to"),
    (("report", "nothere", "--out", "o"), "'nothere' does not exist"),
    (("report", LONG), "longer than file names may be"),
    (("report", "r1", "--out", "s.toml"), "'s.toml' is a file; give a directory"),
    (("report", "r1", "--out", "s.toml/x"), "cannot write"),
    ((*COMPARE, "x" * 300), "File name too long"),
    ((*COMPARE, "o", "--budget", "rounds=10000000000"), "`rounds` must be at most"),
    ((*COMPARE, "o", "--goal", "up"), "--goal"),
    (("init", "x" * 300), "File name too long"),
    (("roster", LONG), "File name too long"),
    (("check-method", LONG), "File name too long"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("commands")
    (place / "s.toml").write_text(SPEC)
    fedspan.run(place / "s.toml", place / "r1", progress=False)
    return place


@pytest.mark.parametrize(("words", "said"), MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_is_one_line_and_leaves_nothing(
    words: tuple[str, ...], said: str, made: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(made)
    before = sorted(made.rglob("*"))
    assert main(monkeypatch, *words) == 2
    told = capsys.readouterr().err.strip()
    assert "\n" not in told
    assert len(told) < 500
    assert said in told
    assert sorted(made.rglob("*")) == before


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_output_that_cannot_be_written(made: Path) -> None:
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "fedspan", "list"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: the output cannot be read or written: No space left")
    assert len(done.stderr.splitlines()) == 1


def test_long_names_of_metrics_are_folded_and_not_cut(capsys: Any) -> None:
    from fedspan.cli._tables import console, table

    heads = [
        "seed",
        "status",
        "round",
        *(f"{part}{name}" for part in ("", "validation_") for name in ("accuracy", "auroc")),
    ]
    console.print(table(heads, [["0", "finished", "100", *["0.12345"] * 4]]), width=50)
    shown = capsys.readouterr().out
    assert "…" not in shown
