"""Numbers, files and terminals that nobody expects end in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fedspan
from fedspan.core.errors import FedspanError
from fedspan.core.spec import toml_value

ROOT = Path(__file__).parents[2]
SPEC = {
    "rounds": 2,
    "method": {"name": "fedavg", "lr": 0.1},
    "task": {"name": "regression"},
}
RUN_ON_A_DAY = "rounds = 2020-01-01\n[method]\nname = 'fedavg'\n[task]\nname = 'regression'\n"


@pytest.mark.parametrize(
    "change",
    [
        {"epochs": 1e300},
        {"epochs": 10**12},
        {"rounds": 10**12},
        {"method": {"name": "fedavg", "lr": 1e300}},
        {"method": {"name": "fedavg", "lr": 10**400}},
        {"method": {"name": "fedadam", "lr": 0.1, "server": {"tau": 1e300}}},
    ],
)
def test_numbers_that_would_never_end_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(FedspanError, match="at most"):
        fedspan.run(SPEC | change, progress=False)
    with pytest.raises(FedspanError, match="`seeds` must be at most"):
        fedspan.run(SPEC, seeds=10**8, progress=False)


@pytest.mark.parametrize(
    "text",
    ["a = " + "[" * 5000, "a = " + "9" * 5000, "a = \x00", RUN_ON_A_DAY, "t = 07:32:00"],
)
def test_strange_spec_files_are_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(text, "utf-8")
    with pytest.raises(FedspanError) as refused:
        fedspan.Spec.load(tmp_path / "s.toml")
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 500


def test_two_settings_in_one_change_are_refused() -> None:
    with pytest.raises(FedspanError, match="one setting per change"):
        toml_value("1\nb = 2")


COMMANDS = """
import sys
from fedspan.cli.app import main
for words in (["list"], ["list", "ssf"], ["diagnose", "examples/ssf.toml"], ["init", sys.argv[1]]):
    sys.argv[1:] = words
    try:
        main()
    except SystemExit as end:
        assert end.code == 0, words
"""


def test_a_terminal_without_utf8_is_enough(tmp_path: Path) -> None:
    plain = {
        "LC_ALL": "C",
        "PYTHONIOENCODING": "ascii",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, tmp_path / "project"],
        env=os.environ | plain,
        capture_output=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr
    assert (tmp_path / "project/spec.toml").is_file()
