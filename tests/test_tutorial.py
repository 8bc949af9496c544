"""Every block of the tutorial and every cell of the notebook runs, in order, in an empty directory."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import fedspan
from fedspan.drifts import Controls
from fedspan.methods import SSF, FedAvg

ROOT = Path(__file__).parents[1]
TUTORIAL = (ROOT / "docs/tutorial.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TUTORIAL, re.S)
(CONFIG,) = re.findall(r"```toml\n(.*?)```", TUTORIAL, re.S)
COMMANDS = re.findall(
    r"^    ((?:rm|fedspan|flower-superlink|flower-supernode|flwr|python) .*)$", TUTORIAL, re.M
)


def run(code: str, folder: Path) -> str:
    """What a script prints, which runs in a folder as a reader's own would."""
    pytest.importorskip("pandas", reason="the tutorial needs pandas; pip install 'fedspan[pandas]'")
    (folder / "script.py").write_text(code)
    env = os.environ | {"MPLBACKEND": "agg"}
    done = subprocess.run(
        [sys.executable, "script.py"],
        capture_output=True,
        text=True,
        cwd=folder,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_tutorial_runs(tmp_path: Path) -> None:
    (tmp_path / "clinics.py").write_text(BLOCKS[0])
    printed = run("\n".join(BLOCKS[1:]), tmp_path)
    assert re.search(r"SSF +lr", printed)
    assert {"accuracy.png", "clinics.safetensors", "comparison.html", "runs"} <= {
        path.name for path in tmp_path.iterdir()
    }


def test_the_share_that_tutorial_and_notebook_name_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "clinics.py").write_text(BLOCKS[0])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "clinics", raising=False)
    clinics: Any = importlib.import_module("clinics")
    clients = [clinics.data(client) for client in range(3)]
    sent = [
        fedspan.fit(clinics.model(), clients, method=method, rounds=1, progress=False).history[-1][
            "up_bytes"
        ]
        for method in (SSF(rank=0.2, lr=0.1, drift=Controls()), FedAvg(lr=0.1))
    ]
    share = f"{100 * sent[0] / sent[1]:.0f} %"
    for text in (TUTORIAL, (ROOT / "examples/quickstart.ipynb").read_text()):
        assert re.search(r"`SSF\(rank=0.2\)` [^`]*?(\d+ %)", text)[1] == share  # type: ignore[index]


def test_the_notebook_runs(tmp_path: Path) -> None:
    cells = json.loads((ROOT / "examples/quickstart.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in cells), "strip the outputs"
    assert "SSF" in run("\n".join(code), tmp_path)


@pytest.mark.slow
def test_the_tutorials_nodes_give_the_numbers_of_the_rehearsal(tmp_path: Path) -> None:
    """The commands of the page as they stand, but for the ports, which may be taken, and Flower's home."""
    pytest.importorskip("flwr", reason="Flower is not installed; pip install 'fedspan[flower]'")
    init, remove, rehearse, link, *nodes, submit, load, predict = [
        _free(shlex.split(command.replace("$PWD", str(tmp_path)))) for command in COMMANDS
    ]
    port = _free_port()
    (tmp_path / "home").mkdir()
    (tmp_path / "home/config.toml").write_text(CONFIG.replace("8000", port))
    env = os.environ | {
        "FLWR_HOME": str(tmp_path / "home"),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1", "FLWR_TELEMETRY_ENABLED": "0",
        "FEDSPAN_STATES": str(tmp_path / "states"), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    for command in (init, remove):
        subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True)
    started = []
    try:
        for command in ([*link, "--port", port], *nodes):
            words = [word.replace("8000", port) for word in command]
            started.append(
                subprocess.Popen(
                    words,
                    cwd=tmp_path,
                    env=env,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
        subprocess.run(rehearse, cwd=tmp_path, env=env, check=True, capture_output=True)
        _until_open(int(port))
        subprocess.run(
            [word for word in submit if word != "--stream"],
            cwd=tmp_path,
            env=env,
            check=True,
            capture_output=True,
        )
        until = time.monotonic() + 500
        while time.monotonic() < until and not (tmp_path / "runs/flower/result.json").exists():
            time.sleep(1)
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(60)
    done = subprocess.run(load, cwd=tmp_path, env=env, check=True, capture_output=True, text=True)
    assert re.search(r"north +test +24", done.stdout)
    subprocess.run(predict, cwd=tmp_path, env=env, check=True, capture_output=True)
    assert len((tmp_path / "predictions.csv").read_text().splitlines()) == 121
    here, there = (
        fedspan.load(tmp_path / "runs" / name).history[-1] for name in ("rehearsal", "flower")
    )
    assert here["clients_accuracy"] == there["clients_accuracy"]
    assert here["clients_auroc"] == pytest.approx(there["clients_auroc"], rel=1e-4)
    assert here["up_bytes"] == there["up_bytes"]


def _free(words: list[str]) -> list[str]:
    """A command with a port that is free."""
    at = words.index("--port") + 1 if "--port" in words else len(words)
    return words if at == len(words) else [*words[:at], _free_port(), *words[at + 1 :]]


def _free_port() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


def _until_open(port: int) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise TimeoutError("the SuperLink did not start")
