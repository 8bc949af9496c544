"""Without the calls that only POSIX has (`tests/without_posix`): the same bits, and what a run directory promises."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# A user's script without `if __name__ == "__main__"`: a process that runs it again would start processes without end.
BEGIN = """
import hashlib, json, os, sys, threading, warnings
from pathlib import Path
import torch
from torch import nn
import fedspan
from fedspan.engine import run_dir

run_dir.RunFiles.seconds = -1.0  # a checkpoint with every evaluation
place = Path(sys.argv[1])
torch.manual_seed(0)
X = torch.randn(60, 40)
clients = [(X[i::3], (X[i::3, 0] > 0).long()) for i in range(3)]

def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(40, 16), nn.ReLU(), nn.Linear(16, 2))

def fit(**more):
    settings = {"rounds": 6, "batch_size": 4, "clients_per_round": 2, "eval_every": 2}
    settings |= {"test": clients[0], "validation": clients[1], "method": fedspan.methods.SSF(lr=0.1, local_steps=2)}
    return fedspan.fit(model(), clients, progress=False, **settings | more)

def on_disk(**more):
    return fit(run_dir=place / "cut", engine=fedspan.Engine(states_dir=place / "states"), **more)

def seen(result):
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in result.history]
    weights = b"".join(v.numpy().tobytes() for _, v in sorted(result.weights[0].items()))
    return [rows, hashlib.sha256(weights).hexdigest()]
"""
KILLED = """
class Kill(fedspan.Callback):
    def on_round_end(self, run):
        if run.t == 5:
            os._exit(9)

on_disk(callbacks=[Kill()])
"""
RUNS = """
found = {"fit": seen(fit()), "run directory": seen(fit(run_dir=place / "run"))}
found["loaded"] = seen(fedspan.load(place / "run"))
found["states on disk, resumed"] = seen(on_disk(resume=(place / "cut").exists()))
print(json.dumps(found))
"""
PROCESSES = """
found = {"pool": seen(fit(engine=fedspan.Engine(simulate="pool", workers=2)))}
compared = fedspan.compare(
    ["ssf", "fedavg"], model(), clients, nn.CrossEntropyLoss(), tune={"lr": [0.1, 0.3]}, seeds=2, rounds=2,
    batch_size=4, test=clients[0], jobs=2, progress=False,
)
print(compared, file=sys.stderr)
found["compare"] = [row | {"seconds": 0} for row in compared.rows + compared.tried]
print(json.dumps(found))
"""
PROMISES = """
from fedspan.core import files
from fedspan.core.errors import DiskError, SpecError
from fedspan.core.files import lock_dir

def refused(error, call):
    try:
        call()
    except error as told:
        return str(told)

def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)

found = {}
with lock_dir(place / "run"):
    found["lock"] = refused(SpecError, lambda: fit(run_dir=place / "run"))
fit(run_dir=place / "run")
found["left"] = sorted(path.name for path in place.iterdir())

with (place / "run" / "spec.toml").open("rb") as reader:  # as another program may
    threading.Timer(0.1, reader.close).start()
    files.write_atomic(place / "run" / "spec.toml", b"new")
found["replaced"] = (place / "run" / "spec.toml").read_bytes().decode()

big = {"task": {"name": "regression", "dim": 10**5}, "rounds": 1, "method": {"name": "fedavg", "lr": 0.1}}
found["memory"] = refused(SpecError, lambda: fedspan.run(big, progress=False))

class Fails(fedspan.Callback):
    def on_evaluate(self, run, row):
        run.transport.save()  # the states are on disk now
        raise ZeroDivisionError

refused(ZeroDivisionError, lambda: on_disk(callbacks=[Fails()]))
found["begun again"] = on_disk().status

if os.name == "posix":
    (place / "victim").write_bytes(b"untouched")
    (place / "link").symlink_to(place / "victim")
    found["link"] = refused(DiskError, lambda: files.append(place / "link", b"more"))
    found["victim"] = (place / "victim").read_bytes().decode()

with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    pool, loop = (seen(fit(loss=loss, engine=fedspan.Engine(simulate=way))) for way in ("pool", "loop"))
    fedspan.compare(["ssf"], model(), clients, loss, seeds=1, rounds=1, jobs=2, progress=False)
found |= {"pool is loop": pool == loop, "said": [str(one.message) for one in told]}
print(json.dumps(found))
"""


def start(place: Path, script: str, posix: bool = False) -> subprocess.Popen[str]:
    """A process without POSIX, whose output goes into a pipe as on Windows; or a usual one."""
    place.mkdir(exist_ok=True)
    (place / "script.py").write_text(BEGIN + script, "utf-8")
    paths = [] if posix or os.name != "posix" else [str(ROOT / "tests" / "without_posix")]
    paths += filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    own = {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONIOENCODING": "cp1252",
        "OMP_NUM_THREADS": "1",
    }
    own |= {} if posix else {"PYTHONWARNDEFAULTENCODING": "1"}
    return subprocess.Popen(
        [sys.executable, str(place / "script.py"), str(place)], env=os.environ | own, encoding="cp1252",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def found_by(process: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    """What a script found, and what it wrote to stderr."""
    said, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return json.loads(said), errors


def test_runs_have_the_same_bits(tmp_path: Path) -> None:
    """In memory, in a directory, and killed and resumed with states on disk."""
    posix = start(tmp_path / "posix", RUNS, posix=True)
    killed = start(tmp_path / "other", KILLED)
    assert killed.communicate(timeout=300)[0] == ""
    assert killed.returncode == 9
    assert list((tmp_path / "other" / "states").glob("*.states"))
    other, errors = found_by(start(tmp_path / "other", RUNS))
    for what, values in found_by(posix)[0].items():
        assert other[what] == values, what
    assert errors.count("cannot be made private") == 1


@pytest.mark.slow
def test_several_processes_give_the_same_bits(tmp_path: Path) -> None:
    """They are spawned, and the script, which has no `if __name__ == "__main__"`, is not run again."""
    posix, other = (
        start(tmp_path / "posix", PROCESSES, posix=True),
        start(tmp_path / "other", PROCESSES),
    )
    (expected, _), (found, errors) = found_by(posix), found_by(other)
    for what, values in expected.items():
        assert found[what] == values, what
    assert errors.count("cannot be made private") == 1
    assert "needs functions" not in errors


def test_a_run_directory_keeps_its_promises(tmp_path: Path) -> None:
    """What cannot be had is said in one line."""
    found, errors = found_by(start(tmp_path / "other", PROMISES))
    assert "is being written by another process" in found["lock"]
    assert found["left"] == ["run", "script.py"]
    assert found["replaced"] == "new"
    assert found["begun again"] == "finished"
    assert errors.count("cannot be made private") == 1
    for words in (
        "simulate 'pool' needs functions and classes",
        "`jobs` 2 needs functions and classes",
    ):
        assert sum(one.startswith(words) for one in found["said"]) == 1
    assert found["pool is loop"]
    if os.name == "posix":
        assert "the machine has 4 GB" in found["memory"]
        assert found["link"].startswith("cannot write")
        assert found["victim"] == "untouched"


MODE = re.compile(r"[rwax]\+?t?\+?")


def default_encoding(call: ast.Call) -> bool:
    """Whether a call opens a text file without naming its encoding."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if any(word.arg == "encoding" for word in call.keywords):
        return False
    if name != "open":
        return len(call.args) < {"read_text": 1, "write_text": 2}.get(name, 0)
    modes = call.args[0 if isinstance(call.func, ast.Attribute) else 1 :]
    return not modes or (
        isinstance(modes[0], ast.Constant) and bool(MODE.fullmatch(str(modes[0].value)))
    )


@pytest.mark.parametrize("folder", ["src", "examples", "benchmarks", "studies", "docs"])
def test_text_files_name_their_encoding(folder: str) -> None:
    """The default is another one on Windows."""
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        calls = [one for one in ast.walk(ast.parse(path.read_bytes())) if isinstance(one, ast.Call)]
        found += [
            f"{path.relative_to(ROOT)}:{call.lineno}" for call in calls if default_encoding(call)
        ]
    assert not found
