"""`fedspan run`: flags, exit codes, and mistakes in one line."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedspan.api.run import run
from fedspan.core.errors import SpecError
from support.commands import fedspan, main, rows, spec_file

MISTAKES = {
    "unknown method": (["--set", "method.name=sff"], "did you mean 'ssf'?"),
    "unknown key": (["--set", "method.lrr=1"], "did you mean 'lr'?"),
    "unknown table": (["--set", "tusk.het=1"], "did you mean 'task'?"),
    "wrong type": (
        ["--set", "method.lr=fast"],
        "`method.lr` must be a number or 'search' or 'auto', got 'fast'",
    ),
    "no projector": (["--set", "method.space=3"], "must be a projector, its name or a table"),
    "through a value": (["--set", "seed.a=1"], "'seed' is a value"),
    "no sign": (["--set", "seed"], "'--set': write key=value"),
    "negative step": (
        ["--set", "method.lr=-0.1"],
        "`method.lr` must be a positive number, got -0.1",
    ),
    "nan step": (["--set", "method.lr=nan"], "`method.lr` must be a positive number"),
    "bad rule": (["--set", "method.drift.rule=papr"], "did you mean 'paper'?"),
    "rank over d": (
        ["--set", "method.space.rank=200"],
        "larger than the 100 inputs of block 'X'",
    ),
    "rank zero": (["--set", "method.space.rank=0"], "`method.space.rank` must be"),
    "too many clients": (["--set", "clients_per_round=21"], "from 1 to the 20 clients, got 21"),
    "no clients": (["--set", "clients_per_round=0"], "at least 1, got 0"),
    "no rounds": (["--set", "rounds=0"], "`rounds` must be a whole number of at least 1"),
    "huge seed": (["--set", "seed=18446744073709551616"], "below 2**64"),
    "bad dtype": (["--set", "dtype=float16"], "`dtype` must be one of float32, float64"),
    "bad batch": (["--set", "batch_size=half"], "a whole number or 'full'"),
    "missing data": (["--set", "task.data=none.npz"], "'none.npz' does not exist"),
    "nothing to resume": (["--resume"], "no checkpoint at"),
    "missing plugin": (["--plugin", "mine.py"], "'mine.py' does not exist"),
    "unknown callback": (["--callback", "early_stoping"], "`--callback` must be one of"),
    "no seeds": (["--seeds", "0"], "'--seeds': 0 is not in the range"),
    "unknown flag": (["--out", "o"], "No such option"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_writes_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    extra, words = MISTAKES[name]
    assert main(monkeypatch, "run", spec_file(tmp_path), "--run-dir", tmp_path / "o", *extra) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert words in lines[0]
    assert not (tmp_path / "o").exists()


def test_a_mistake_on_the_real_command_line(tmp_path: Path) -> None:
    done = fedspan("run", tmp_path / "no.toml", "--run-dir", tmp_path / "o")
    assert done.returncode == 2
    assert done.stderr.strip().endswith("does not exist")
    assert "Traceback" not in done.stderr


def test_a_file_that_is_not_toml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "bad.toml").write_text("rounds = = 3")
    assert main(monkeypatch, "run", tmp_path / "bad.toml") == 2
    assert "is not TOML" in capsys.readouterr().err


def test_resume_without_a_directory_names_the_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert main(monkeypatch, "run", spec_file(tmp_path), "--resume") == 2
    assert "--resume needs the --run-dir of the run to continue" in capsys.readouterr().err
    place = tmp_path / "o"
    assert main(monkeypatch, "run", spec_file(tmp_path), "--run-dir", place) == 0
    assert main(monkeypatch, "run", spec_file(tmp_path), "--run-dir", place) == 2
    assert "continue it with --resume, or choose another --run-dir" in capsys.readouterr().err
    with pytest.raises(
        SpecError, match="continue it with `resume=True`, or choose another `run_dir`"
    ):
        run(spec_file(tmp_path), place)


def test_a_run_and_its_short_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    flags = (
        "--set",
        "engine.simulate=loop",
        "--callback",
        "keep_best",
        "--seeds",
        "2",
    )
    assert main(monkeypatch, "run", spec_file(tmp_path), "--run-dir", tmp_path / "o", *flags) == 0
    shown = capsys.readouterr().out
    assert "finished" in shown
    assert "saved in" in shown
    written = tomllib.loads((tmp_path / "o/spec.toml").read_text())
    assert written["engine"] | {"simulate": "loop"} == written["engine"]
    assert written["callbacks"] == [{"name": "keep_best"}]
    assert (tmp_path / "o/checkpoint.safetensors").exists()
    assert [row["round"] for row in rows(tmp_path / "o/seed-4")] == [0, 10, 20, 30, 40]


def test_a_run_without_a_directory_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert main(monkeypatch, "run", spec_file(tmp_path, 10)) == 0
    assert "not saved; give --run-dir" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"spec.toml"}


def test_a_diverged_run_is_shown_and_has_exit_code_1(tmp_path: Path) -> None:
    done = fedspan(
        "run", spec_file(tmp_path, 400), "--run-dir", tmp_path / "o", "--set", "method.lr=5.0"
    )
    assert done.returncode == 1, done.stderr
    assert f"diverged at round {rows(tmp_path / 'o')[-1]['round']}" in " ".join(done.stdout.split())
    assert "warning: the run of seed 3 diverged" in done.stderr
    assert "UserWarning" not in done.stderr


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_how_to_resume(
    sign: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "from fedspan.cli.app import main; main()"
    words = ["run", str(spec_file(tmp_path, 3000)), "--run-dir", str(tmp_path / "o")]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and not (tmp_path / "o/history.jsonl").exists():
        time.sleep(0.02)
    process.send_signal(sign)
    _, told = process.communicate(timeout=300)
    assert process.returncode == (130 if sign == signal.SIGINT else -signal.SIGTERM)
    assert "Traceback" not in told
    assert told.strip().splitlines()[-1].startswith("interrupted; continue with: fedspan run ")
    assert told.strip().endswith("--resume")
    end = 20 + max((row["round"] for row in rows(tmp_path / "o")), default=0)
    assert main(monkeypatch, *words, "--resume", "--set", f"rounds={end}") == 0
    assert [row["round"] for row in rows(tmp_path / "o")] == [*range(0, end + 1, 10)]


def test_resuming_a_run_that_was_stopped_early_says_that_nothing_was_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    spec = spec_file(tmp_path)
    words = ["run", str(spec), "--run-dir", str(tmp_path / "run"), "--set", "rounds=8"]
    words += ["--set", "eval_every=1"]
    words += ["--set", 'callbacks=[{name = "early_stopping", patience = 1, min_delta = 1e9}]']
    assert main(monkeypatch, *words) == 0
    assert "nothing was run" not in capsys.readouterr().err
    assert main(monkeypatch, *words, "--resume") == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "nothing was run: the run in " in said
    assert "has ended (stopped at round" in said
    assert "choose another `run_dir`" in said
