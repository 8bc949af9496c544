"""What a terminal of 80 columns shows: no broken words, no line that is too long, and bars that end full."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedspan.cli.app import app

SPEC = """
rounds = 40
eval_every = 4
batch_size = 4
clients_per_round = 3
[method]
name = "ssf"
lr = 0.02
local_steps = 2
rank = 3
[task]
name = "regression"
clients = 7
dim = 12
outputs = 2
samples = 9
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    (tmp_path / "spec.toml").write_text(SPEC)
    return tmp_path / "spec.toml"


def on_terminal(words: list[str]) -> list[str]:
    """What a command prints on a terminal of 80 columns, as lines; those that a bar has overwritten too."""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    env = os.environ | {"COLUMNS": "80", "TERM": "xterm", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "fedspan", *words], stdout=theirs, stderr=theirs, env=env
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            new = os.read(ours, 1 << 16)
        except OSError:  # of a terminal that nobody writes to any more
            break
        if not new:
            break
        shown += new
    os.close(ours)
    assert process.wait() == 0, shown
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode()))


def test_a_comparison_breaks_no_word_and_its_bar_ends_full(spec: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    grid = "lr=0.0001,0.02,0.05,0.1"  # some are stopped early, and others run on from where they stopped
    lines = on_terminal(
        ["compare", str(spec), "--methods", "fedavg,ssf", "--grid", grid, "--out", str(out)]
    )
    assert max(map(len, lines)) <= 80 or not [
        line for line in lines if len(line) > 80 and " " in line.strip()
    ]
    bars = [line for line in lines if " % " in line and "━" in line]
    assert "100 %" in bars[-1]
    assert any(" runs" in line and "of " in line for line in bars)
    said = " ".join((out / "tables.md").read_text().split("\n\n")[1].split())
    assert said in " ".join(" ".join(lines).split())


def test_the_table_of_a_proposal_fits(spec: Path) -> None:
    words = [
        "tune",
        str(spec),
        "--budget",
        "total=100kB",
        "--grid",
        "rank=0.1,0.5",
        "--grid",
        "local_steps=2,4",
    ]
    done = CliRunner().invoke(app, words, env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    table = done.stdout.partition("\n\n")[0].splitlines()
    assert table[0].split() == [
        "method",
        "rank",
        "local",
        "steps",
        "rounds",
        "rel",
        "err",
        "chosen",
    ]
    assert len(table) == 1 + 2 * 2  # one line per setting
    assert max(map(len, table)) <= 80
    assert "100 %" in done.stderr
