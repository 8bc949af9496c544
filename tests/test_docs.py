"""The README's commands and examples run, links lead somewhere, and the repository speaks of the product alone."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fedspan.cli import app as cli
from fedspan.study.parse import study_of

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, check=False)


def test_the_readmes_example_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(blocks) == 1
    assert blocks[0].count("\n") <= 20
    done = python(blocks[0], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "MB up" in done.stdout


def test_the_example_of_a_new_method_runs() -> None:
    done = subprocess.run([sys.executable, ROOT / "examples/new_method.py"], capture_output=True, text=True, check=True)
    assert "new_method" in done.stdout


def test_the_example_is_a_plugin_of_the_command_line(tmp_path: Path) -> None:
    method = 'method={name="new_method", lr=0.01, local_steps=5, mu=0.1}'
    command = [
        "run",
        ROOT / "examples/ssf.toml",
        "--plugin",
        ROOT / "examples/new_method.py",
        "--run-dir",
        tmp_path / "o",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "fedspan", *command, "--set", method, "--set", "rounds=50"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_commands_of_the_comparing_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another in a fresh folder, as a reader would; a tracker that is not installed is left out."""
    lines = re.findall(r"^    (fedspan .*)$", (ROOT / "docs/comparing.md").read_text(), re.M)
    assert len(lines) == 9
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    for line in lines:
        words = shlex.split(line)
        if "--callback" in words and importlib.util.find_spec(words[words.index("--callback") + 1]) is None:
            continue
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert end.value.code == 0, line
    written = {path.name for path in (tmp_path / "out/side").iterdir()}
    assert written == {"index.html", "tables.md", "results.csv", "curves.csv", "study.toml", "curves.json.gz", "runs"}
    assert "SSF small" in (tmp_path / "out/sizes/tables.md").read_text()
    assert (tmp_path / "out/report/results.csv").read_text().count("\n") == 3


def test_the_script_of_the_comparing_page_runs(tmp_path: Path) -> None:
    """With a smaller budget than the page, which shows what the script prints."""
    page = (ROOT / "docs/comparing.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    assert 'budget="total=6MB"' in code
    done = python(code.replace("total=6MB", "total=2MB"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("method   tuned")
    assert "Settings were chosen by the training loss on the first seed, not by the test set." in done.stdout
    assert (tmp_path / "runs/digits/study.toml").exists()


def test_the_comparison_file_of_the_comparing_page_is_valid() -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/comparing.md").read_text(), re.S)
    (part,) = study_of(tomllib.loads(block)).parts
    assert part.budget is not None
    free = dataclasses.replace(part, budget=None)  # a budget of bytes is planned on the data, which may not be here
    assert [free.spec(v, p).method.lr for v in free.variants for p in v.points()] == [0.2, 0.5, 1.0, 0.05, 0.1, 0.2]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_commands_named_in_the_docs_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for target in re.findall(r"`make ([a-z-]+)`", page.read_text()):
            assert f"\n{target}:" in makefile, f"{page.name}: make {target}"


def test_no_file_of_the_repository_needs_pickle() -> None:
    for path in [*ROOT.glob("src/**/*.py"), *ROOT.glob("benchmarks/*.py"), *ROOT.glob("examples/*.py")]:
        text = path.read_text()
        if path.name != "pool.py":  # answers of our own forked children, through a pipe
            assert "import pickle\n" not in text, path
        assert "torch.load(" not in text.replace("safetensors.torch.load(", ""), path
        assert "allow_pickle=True" not in text, path


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "fedspan", "version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("fedspan ")
