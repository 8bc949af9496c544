"""One process at a time in a run directory: a second one is refused and changes nothing; a dead one holds no lock."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tomli_w
from rich.console import Console

from fedspan.api.run import run
from fedspan.core.errors import SpecError
from fedspan.core.spec import Spec
from fedspan.engine.run_dir import lock_dir
from fedspan.study import conduct
from fedspan.study.model import study_of
from support.loops import SMALL

TABLE = {
    "rounds": 4,
    "eval_every": 2,
    "task": SMALL,
    "method": {"name": "fedavg", "lr": 0.02, "local_steps": 2},
}
HOLD = """
import sys, time, pathlib
from fedspan.engine.run_dir import lock_dir
with lock_dir(pathlib.Path(sys.argv[1])):
    print(1, flush=True)
    time.sleep(60)
"""


def test_a_run_in_a_locked_directory_changes_nothing(tmp_path: Path) -> None:
    spec, out = Spec.from_table(TABLE), tmp_path / "o"
    run(spec, out)
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    with (
        lock_dir(out),
        pytest.raises(SpecError, match="is being written by another process; wait for it"),
    ):
        run(spec, out, resume=True)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    run(spec, out, resume=True)


def test_a_comparison_in_a_locked_directory_runs_nothing(tmp_path: Path) -> None:
    study = study_of({"base": TABLE, "variants": {"fedavg": {}}, "metric": "rel_err", "seeds": 1})
    with lock_dir(tmp_path / "out"), pytest.raises(SpecError, match="another process"):
        conduct.conduct(study, tmp_path / "out", console=Console(quiet=True))
    assert not list((tmp_path / "out").iterdir())


def test_a_dead_process_holds_no_lock_and_a_refused_one_leaves_nothing(tmp_path: Path) -> None:
    place = tmp_path / "new"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(place)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    with pytest.raises(SpecError, match="another process"), lock_dir(place):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    time.sleep(0.05)
    with pytest.raises(ZeroDivisionError), lock_dir(place):
        raise ZeroDivisionError
    assert not place.exists()


def free(directories: list[Path]) -> bool:
    """Whether no process writes there any more."""
    try:
        for directory in directories:
            with lock_dir(directory):
                pass
    except SpecError:
        return False
    return True


@pytest.mark.parametrize(
    "sign", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_worker_processes_end_with_their_parent(sign: int, tmp_path: Path) -> None:
    spec, out = tmp_path / "spec.toml", tmp_path / "o"
    spec.write_text(tomli_w.dumps(TABLE | {"rounds": 10**7, "eval_every": 50}))
    words = [
        "compare",
        spec,
        "--methods",
        "fedavg,scaffold",
        "--seeds",
        "1",
        "--jobs",
        "2",
        "--format",
        "csv",
    ]
    line = [sys.executable, "-m", "fedspan", *map(str, words), "--out", str(out)]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(begun := [path.parent for path in out.glob("runs/**/history.jsonl")]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert not free(begun)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    ids = workers.read_text().split() if workers.exists() else []
    process.send_signal(sign)
    assert process.wait(60) == -sign
    while not free(begun):
        assert time.monotonic() < deadline
        assert sign == signal.SIGKILL  # else all have ended before the parent
        time.sleep(0.1)
    while any(Path(f"/proc/{number}").exists() for number in ids):  # no worker is left
        assert time.monotonic() < deadline
        time.sleep(0.1)
