"""Spec files and the command line, in this process and in one of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedspan.cli import app as cli
from fedspan.engine import history

SPEC = """
seed = 3
rounds = {rounds}
eval_every = 10
clients_per_round = 10
[method]
name = "ssf"
lr = 1e-2
local_steps = 5
space = {{ name = "gaussian", rank = 20 }}
[task]
name = "regression"
het = 0.5
"""


def spec_file(place: Path, rounds: int = 40) -> Path:
    path = place / "spec.toml"
    path.write_text(SPEC.format(rounds=rounds))
    return path


def fedspan(
    *arguments: Any, code: str = "from fedspan.cli.app import main; main()"
) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


def rows(place: Path) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in row.items() if k != "seconds"}
        for row in history.read(place / "history.jsonl")[1]
    ]


def main(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> int:
    """The exit code of a command in this process."""
    monkeypatch.setattr(sys, "argv", ["fedspan", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert isinstance(stop.value.code, int)
    return stop.value.code
