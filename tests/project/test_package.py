"""What a package index and an installer read: the wheel, the source archive, and files that must agree."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import fedspan

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def bounds() -> dict[str, str]:
    """Return the lower bound of each requirement of the package and of what the short suite needs."""
    extras = PROJECT["optional-dependencies"]
    wanted = [
        *PROJECT["dependencies"],
        *(one for name in ("pandas", "plot", "privacy", "vision", "test") for one in extras[name]),
    ]
    found = (re.match(r"([\w-]+)>=([\d.]+)", one) for one in wanted)
    return {match[1]: match[2] for match in found if match}


def test_the_lowest_versions_that_are_tested_are_the_lower_bounds() -> None:
    lines = (ROOT / ".ci/lowest.txt").read_text(encoding="utf-8").splitlines()
    tested = dict(line.split("==") for line in lines if "==" in line)
    assert tested.keys() == bounds().keys()
    for name, bound in bounds().items():
        assert re.fullmatch(rf"{re.escape(bound)}(\.0)*", tested[name]), name


def test_the_versions_of_python_agree() -> None:
    named = {
        one.rsplit(" ", 1)[1]
        for one in PROJECT["classifiers"]
        if re.search(r"Python :: 3\.\d+$", one)
    }
    assert PROJECT["requires-python"] == f">={min(named, key=lambda one: int(one[2:]))}"
    workflow = (ROOT / ".github/workflows/test.yml").read_text(encoding="utf-8")
    assert all(f'"{one}"' in workflow for one in named)
    lowest = PROJECT["requires-python"].removeprefix(">=")
    assert f"fedspan needs Python {lowest} or newer" in (ROOT / "README.md").read_text(
        encoding="utf-8"
    )


def test_the_citation_names_this_version() -> None:
    assert f"\nversion: {fedspan.__version__}\n" in (ROOT / "CITATION.cff").read_text(
        encoding="utf-8"
    )


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_nothing_is_installed_while_the_demo_runs() -> None:
    """Under `make -j2 test demo`, in any order."""
    words = ["make", "--dry-run", "--always-make", "test", "demo"]
    env = {
        key: value for key, value in os.environ.items() if not key.startswith("MAKE")
    }  # that of `make test`
    planned = subprocess.run(
        words, cwd=ROOT, env=env, capture_output=True, text=True, check=True
    ).stdout
    assert 0 < planned.index("examples/quickstart.py") < planned.index(".[dev,docs]")


@pytest.mark.slow
def test_what_is_released_is_small_and_complete(tmp_path: Path) -> None:
    if importlib.util.find_spec("build") is None:
        pytest.skip("build is not installed; pip install build")
    subprocess.run(
        [sys.executable, "-m", "build", str(ROOT), "-o", str(tmp_path)],
        check=True,
        capture_output=True,
    )
    (wheel,), (source,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    assert source.stat().st_size < 2_000_000
    with tarfile.open(source) as archive:
        assert any(name.endswith("/tests/conftest.py") for name in archive.getnames())
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
    assert "fedspan/py.typed" in names
    assert {name.rpartition("/")[2] for name in names if "/licenses/" in name} == {
        "LICENSE",
        "NOTICE",
    }
    assert all(name.startswith("fedspan") for name in names)
    readme = Parser().parsestr(text).get_payload()
    assert [
        one
        for one in re.findall(r"\]\(([^)]+)\)", str(readme))
        if not one.startswith(("https://", "#"))
    ] == []
