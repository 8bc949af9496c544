"""Which build of torch `.ci/install-torch` takes, by a pip, an nvidia-smi and a uname that only pretend."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a shell script of the Makefile")

# Notes real installs; a dry run finds what $OFFERS names: "local", "index", both or none.
PIP = f"""#!/bin/sh
case "$*" in
    *--dry-run*{CPU_INDEX}*) case "$OFFERS" in *index*) exit 0 ;; esac ;;
    *--dry-run*) case "$OFFERS" in *local*) exit 0 ;; *broken*) echo "ERROR: no space left"; exit 1 ;; esac ;;
    *) echo "$*" >> installed; exit 0 ;;
esac
echo "ERROR: No matching distribution found for torch"; exit 1
"""


def install(
    folder: Path, *, offers: str = "", driver: bool = False, system: str = "Linux", torch: str = ""
) -> tuple[str, subprocess.CompletedProcess[str]]:
    """(what pip was told to install, the ended script)."""
    for name, text in {
        "pip": PIP,
        "nvidia-smi": f"#!/bin/sh\nexit {int(not driver)}\n",
        "uname": f"#!/bin/sh\necho {system}\n",
    }.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "OFFERS": offers, "TORCH": torch}
    done = subprocess.run(
        [ROOT / ".ci/install-torch", folder / "pip", "2.13.0"],
        capture_output=True,
        text=True,
        cwd=folder,
        env=env,
        check=False,
    )
    log = folder / "installed"
    return log.read_text().strip() if log.exists() else "", done


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"offers": "local index"}, "install torch==2.13.0+cpu"),
        ({"offers": "index"}, f"install --no-deps --index-url {CPU_INDEX} torch==2.13.0+cpu"),
        ({"offers": "local index", "driver": True}, "install torch==2.13.0"),
        ({"system": "Darwin"}, "install torch==2.13.0"),
        (
            {"offers": "local", "torch": "torch==2.9.1 --index-url x"},
            "install torch==2.9.1 --index-url x",
        ),
        ({"driver": True, "torch": "torch==2.9.1"}, "install torch==2.9.1"),
    ],
)
def test_the_smallest_build_that_serves_is_taken(
    given: dict[str, object], expected: str, tmp_path: Path
) -> None:
    installed, done = install(tmp_path, **given)  # type: ignore[arg-type]
    assert (done.returncode, done.stderr) == (0, "")
    assert installed == expected


def test_the_large_build_comes_with_a_warning_of_one_line(tmp_path: Path) -> None:
    installed, done = install(tmp_path)
    assert (done.returncode, installed) == (0, "install torch==2.13.0")
    assert done.stderr.count("\n") == 1
    assert "5 GB" in done.stderr
    assert "TORCH=" in done.stderr


def test_an_error_of_pip_does_not_lead_to_the_large_build(tmp_path: Path) -> None:
    installed, done = install(tmp_path, offers="broken")
    assert done.returncode != 0
    assert installed == ""
    assert "no space left" in done.stderr
