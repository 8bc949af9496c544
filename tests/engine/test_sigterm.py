"""SIGTERM of real processes: what was done is saved, the process ends by the signal, and a run resumes bit for bit."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

import fedspan
from support.loops import SMALL

SCRIPT = """
import signal, sys, threading, types
from pathlib import Path
import torch
import fedspan

class Wait(fedspan.Callback):  # long enough to be told in the middle of round 7
    def on_round_end(self, run):
        if run.t == 7 and not resume:
            Path(place, "waiting").touch()
            for _ in range(3000):
                if Path(place, "told").exists():
                    break
                __import__("time").sleep(0.01)

def fit():
    torch.manual_seed(0)
    X = torch.randn(40, 5)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 2))
    return fedspan.fit(
        model, [(X[i::2], (X[i::2, 0] > 0).long()) for i in range(2)], method="scaffold", rounds=12, batch_size=4,
        engine=fedspan.Engine(simulate=simulate), run_dir=f"{place}/run", resume=resume, progress=False,
        callbacks=[Wait()],
    )

if __name__ == "__main__":
    place, resume, simulate, before = sys.argv[1], sys.argv[2] == "resume", sys.argv[3], sys.argv[4]
    exec(before)
    print("fit gave", fit().status, flush=True)
"""


def start(
    place: Path, *more: str, before: str = "", simulate: str = "loop", under: tuple[str, ...] = ()
) -> Any:
    (place / "script.py").write_text(SCRIPT)
    line = [
        *under,
        sys.executable,
        str(place / "script.py"),
        str(place),
        *(more or ("begin",)),
        simulate,
        before,
    ]
    return subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def terminated(place: Path, process: Any, group: bool = False) -> tuple[int, str, str]:
    """Sends SIGTERM in round 7; (exit status, output, errors)."""
    wait_for(place / "waiting")
    (os.killpg if group else os.kill)(process.pid, signal.SIGTERM)
    (place / "told").touch()
    said, errors = process.communicate(timeout=120)
    return process.returncode, said, errors


def resumes_to_the_same_bits(place: Path) -> None:
    assert fedspan.load(place / "run").status == "interrupted"
    done = start(place, "resume")
    assert "fit gave finished" in done.communicate(timeout=120)[0]
    whole = place / "whole"
    whole.mkdir()
    (whole / "told").touch()
    process = start(whole)
    assert "fit gave finished" in process.communicate(timeout=120)[0]
    one, other = fedspan.load(place / "run"), fedspan.load(whole / "run")
    rows = [
        [{k: v for k, v in row.items() if k != "seconds"} for row in each.history]
        for each in (one, other)
    ]
    assert rows[0] == rows[1]
    assert all(torch.equal(one.weights[0][name], value) for name, value in other.weights[0].items())


@pytest.mark.parametrize("simulate", ["loop", pytest.param("pool", marks=pytest.mark.slow)])
def test_fit_saves_and_ends_by_the_signal(simulate: str, tmp_path: Path) -> None:
    code, said, errors = terminated(
        tmp_path, start(tmp_path, simulate=simulate), group=simulate == "pool"
    )
    assert (code, said, errors) == (-signal.SIGTERM, "", "")
    resumes_to_the_same_bits(tmp_path)


@pytest.mark.skipif(shutil.which("timeout") is None, reason="needs coreutils' timeout")
@pytest.mark.slow
def test_timeout_saves_what_was_done(tmp_path: Path) -> None:
    """It sends the signal twice, to the process and to its group, and ends as its command does."""
    code, said, errors = terminated(tmp_path, start(tmp_path, under=("timeout", "600")))
    assert (code, said, errors) == (-signal.SIGTERM, "", "")
    resumes_to_the_same_bits(tmp_path)


@pytest.mark.slow
def test_a_handler_of_the_users_is_called_once_the_run_is_saved(tmp_path: Path) -> None:
    before = """
def mine(number, frame):
    print("mine", number, fedspan.load(f"{place}/run").status, flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, mine)
"""
    code, said, errors = terminated(tmp_path, start(tmp_path, before=before))
    assert (code, said, errors) == (7, "mine 15 interrupted\n", "")
    resumes_to_the_same_bits(tmp_path)


RAISED = """
try:
    fit()
except fedspan.Terminated as error:
    print("raised", error, signal.getsignal(signal.SIGTERM), flush=True)
sys.exit()
"""


@pytest.mark.parametrize(
    "before",
    [
        "signal.signal(signal.SIGTERM, print)" + RAISED,
        "kernel = types.SimpleNamespace(kernel=1)\n"
        "sys.modules['IPython'] = types.SimpleNamespace(get_ipython=lambda: kernel)" + RAISED,
    ],
    ids=["handler", "notebook"],
)
@pytest.mark.slow
def test_where_the_process_goes_on_no_truncated_result_is_returned(
    before: str, tmp_path: Path
) -> None:
    code, said, errors = terminated(tmp_path, start(tmp_path, before=before))
    assert (code, errors) == (0, "")
    assert "raised stopped after round 7; resume=True continues the run in" in said
    assert ("built-in function print" in said) == ("print)" in before)  # the handler is put back
    resumes_to_the_same_bits(tmp_path)


def test_a_run_in_a_thread_is_never_truncated(tmp_path: Path) -> None:
    before = """
seen = []
thread = threading.Thread(target=lambda: seen.append(fit().status))
signal.signal(signal.SIGTERM, lambda *_: print("main thread", flush=True))
thread.start()
thread.join()
print(seen)
sys.exit()
"""
    code, said, errors = terminated(tmp_path, start(tmp_path, before=before))
    assert (code, said, errors) == (0, "main thread\n['finished']\n", "")


def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    code, said, _ = terminated(
        tmp_path, start(tmp_path, before="signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    )
    assert (code, said) == (0, "fit gave finished\n")


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_comparison_saves_its_runs_and_leaves_no_process(jobs: str, tmp_path: Path) -> None:
    table = {
        "rounds": 10**7,
        "eval_every": 50,
        "task": SMALL,
        "method": {"name": "fedavg", "lr": 0.02},
    }
    (tmp_path / "spec.toml").write_text(tomli_w.dumps(table))
    words = [
        "compare",
        "spec.toml",
        "--methods",
        "fedavg,scaffold",
        "--seeds",
        "1",
        "--jobs",
        jobs,
        "--out",
        "o",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "fedspan", *words], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("o/runs/**/history.jsonl"))) < int(jobs):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGTERM)
    said, errors = process.communicate(timeout=60)  # the pipes close when the last process ends
    assert (process.returncode, errors) == (-signal.SIGTERM, "")
    assert "stopped; complete runs are kept" in said
    assert len(list(tmp_path.glob("o/runs/**/checkpoint.safetensors"))) == int(jobs)
