"""Benchmarks and examples that are terminated end the processes they have started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedspan.study.execute import GRACE

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="looks for processes in /proc"
)
COMMANDS = {
    "bench": (["benchmarks/bench.py", "population"], 1),
    "population": (["benchmarks/population.py", "--short"], 1),
    "quickstart": (["examples/quickstart.py"], 2),
    "deployment": (["benchmarks/deployment.py"], 4),
    "demo": (["examples/flower/demo.py"], 4),
}
SLOW = ("quickstart", "deployment", "demo")


def marked(mark: str) -> set[int]:
    """Return the ids of living processes that have inherited a mark."""
    found = set()
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (place / "environ").read_bytes().split(b"\0"):
                found.add(int(place.name))
        except OSError:  # it has ended, or is not ours to look at
            continue
    return found


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT], ids=lambda stop: stop.name)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in COMMANDS],
)
def test_a_script_that_is_terminated_leaves_nothing_behind(
    name: str, stop: signal.Signals, tmp_path: Path
) -> None:
    words, children = COMMANDS[name]
    if name in ("deployment", "demo"):
        pytest.importorskip("flwr", reason="Flower is not installed; pip install 'fedspan[flower]'")
    key = f"{tmp_path.name}-{os.getpid()}"
    script = subprocess.Popen(
        [sys.executable, str(ROOT / words[0]), *words[1:]],
        cwd=tmp_path,
        env=os.environ | {"MARK": key},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # which a job of a shell ignores
    )
    try:
        until = time.monotonic() + 60
        while (
            len(marked(f"MARK={key}")) <= children
            and time.monotonic() < until
            and script.poll() is None
        ):
            time.sleep(0.1)
        assert script.poll() is None, "it ended before it was stopped"
        script.send_signal(stop)
        assert script.wait(40) != 0
        until = time.monotonic() + GRACE + 5
        while marked(f"MARK={key}") and time.monotonic() < until:
            time.sleep(0.1)
        assert marked(f"MARK={key}") == set()
    finally:
        for pid in marked(f"MARK={key}"):
            os.kill(pid, signal.SIGKILL)
