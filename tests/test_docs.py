"""The README's commands and examples run, links lead somewhere, and the repository speaks of the product alone."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fedspan.cli import app as cli
from fedspan.core import registry
from fedspan.study.model import study_of

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, check=False
    )


def readme(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


def test_the_readmes_example_prints_what_the_readme_shows(tmp_path: Path) -> None:
    """But for digits of losses and accuracies, which other processors may round differently."""
    done = python(readme("python")[0], tmp_path)
    assert done.returncode == 0, done.stderr
    shown = [
        re.sub(r"(loss|accuracy) [\d.]+", r"\1", line) for line in readme("text")[0].splitlines()
    ]
    printed = [
        re.sub(r"(loss|accuracy) [\d.]+", r"\1", line.strip()) for line in done.stderr.splitlines()
    ]
    assert [line for line in shown if line not in printed] == []


COMPARED = [
    pytest.param(("seeds=3", "seeds=1"), ("0.1, 0.3, 1.0, 3.0", "1.0"), id="short"),
    pytest.param(("", ""), ("", ""), id="in-full", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("seeds", "grid"), COMPARED)
def test_the_readmes_comparison_runs(
    seeds: tuple[str, str], grid: tuple[str, str], tmp_path: Path
) -> None:
    """In full it must give the table and the verdict that the README shows."""
    first, second = readme("python")
    code = (first.split("result = ")[0] + second).replace(*seeds).replace(*grid)
    done = python(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/quickstart/index.html").exists()
    if not seeds[0]:
        assert " ".join(readme("text")[1].split()) in " ".join(done.stdout.split())


def test_the_example_of_a_new_method_runs() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples/new_method.py"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "new_method" in done.stdout
    assert len(done.stderr.splitlines()) < 20


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


def test_the_commands_of_the_comparing_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after another in a fresh folder, as a reader would; a tracker that is not installed is left out."""
    page = (ROOT / "docs/comparing.md").read_text()
    lines, (_, shown) = (
        re.findall(r"^    (fedspan .*)$", page, re.M),
        re.findall(r"```text\n(.*?)```", page, re.S),
    )
    assert len(lines) == 9
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    for line in lines:
        words = shlex.split(line)
        if (
            "--callback" in words
            and importlib.util.find_spec(words[words.index("--callback") + 1]) is None
        ):
            continue
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert end.value.code == 0, line
        if line == lines[0]:
            assert " ".join(shown.split()) in " ".join(
                Path("out/side/tables.md").read_text().split()
            )
    written = {path.name for path in (tmp_path / "out/side").iterdir()}
    assert written == {
        "index.html",
        "tables.md",
        "results.csv",
        "study.toml",
        "curves.json.gz",
        "runs",
    }
    assert "SSF small" in (tmp_path / "out/sizes/tables.md").read_text()
    assert (tmp_path / "out/report/results.csv").read_text().count("\n") == 3


@pytest.mark.parametrize("budget", ["2MB", pytest.param("6MB", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_the_script_of_the_comparing_page_runs(budget: str, tmp_path: Path) -> None:
    """In full it must print what the page shows."""
    page = (ROOT / "docs/comparing.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    assert 'budget="total=6MB"' in code
    done = python(code.replace("total=6MB", f"total={budget}"), tmp_path)
    assert done.returncode == 0, done.stderr
    shown = re.findall(r"```text\n(.*?)```", page, re.S)
    assert len(shown) == 2
    if budget == "6MB":
        assert done.stdout == shown[0]
    assert done.stdout.startswith("method   tuned")
    said = " ".join(done.stdout.split())
    assert (
        "Settings were chosen by the training loss on the first seed, not by the test set." in said
    )
    assert (tmp_path / "runs/digits/study.toml").exists()


@pytest.mark.skipif(
    not (shutil.which("openssl") and shutil.which("ssh-keygen")),
    reason="openssl or ssh-keygen is not installed",
)
def test_the_keys_and_certificates_of_the_deployment_page_are_made(tmp_path: Path) -> None:
    lines = re.findall(
        r"^ {8}((?:openssl|ssh-keygen) .*)$", (ROOT / "docs/deploy.md").read_text(), re.M
    )
    assert len(lines) == 4
    for line in lines:
        done = subprocess.run(
            shlex.split(line), cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        if line.startswith("openssl verify"):
            assert done.stdout == "server.pem: OK\n"
    assert {path.name for path in tmp_path.iterdir()} == {
        "ca.key", "ca.crt", "server.key", "server.pem", "node", "node.pub"
    }  # fmt: skip


def test_the_comparison_file_of_the_comparing_page_is_valid() -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/comparing.md").read_text(), re.S)
    (part,) = study_of(tomllib.loads(block)).parts
    assert part.budget is not None
    free = dataclasses.replace(
        part, budget=None
    )  # a budget of bytes is planned on the data, which may not be here
    assert [free.spec(v, p).method.lr for v in free.variants for p in v.points()] == [
        0.2,
        0.5,
        1.0,
        0.05,
        0.1,
        0.2,
    ]


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
    for path in [
        *ROOT.glob("src/**/*.py"),
        *ROOT.glob("benchmarks/*.py"),
        *ROOT.glob("examples/*.py"),
    ]:
        text = path.read_text()
        if path.name not in (
            "pool.py",
            "processes.py",
        ):  # between a process and its own children, through a pipe
            assert "import pickle\n" not in text, path
            assert "torch.load(" not in text.replace("safetensors.torch.load(", ""), path
        assert "allow_pickle=True" not in text, path


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fedspan", "version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("fedspan ")


def test_the_files_of_the_page_about_methods_run_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A recipe and a choice on each of three axes; every command of the page is run, and every law holds."""
    page = (ROOT / "docs/adding-a-method.md").read_text()
    blocks = re.findall(r"```python\n# (\w+)\.py\n(.*?)```", page, re.S)
    assert len(blocks) == 5
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name, block in blocks:
        (tmp_path / f"{name}.py").write_text(block)
        assert block.count("\n") < 40
    monkeypatch.chdir(tmp_path)
    try:
        for line in re.findall(r"^    (fedspan .*)$", page, re.M):
            monkeypatch.setattr(sys, "argv", shlex.split(line))
            with pytest.raises(SystemExit) as end:
                cli.main()
            assert end.value.code == 0, line + capsys.readouterr().err
    finally:
        for name in ("new_method", *(name for name, _ in blocks)):
            sys.modules.pop(name, None)
            for known in registry._known.values():
                known.pop(name, None)
    told = capsys.readouterr().out
    assert "FAIL" not in told
    assert told.count("every law holds") == 5


def test_the_functions_that_the_paper_leads_to_exist() -> None:
    """The table of lines names files and functions in them, with the number next to the statement in brackets."""
    page = (ROOT / "docs/algorithm-to-code.md").read_text()
    (table,) = re.findall(r"## SSF line by line\n(.*?)\n## ", page, re.S)
    found = 0
    for file, functions in re.findall(r"`(\w+/\w+\.py)`: ((?:`\w+`(?: \(\d\))?(?:, )?)+)", table):
        text = (ROOT / "src/fedspan" / file).read_text()
        for function, number in re.findall(r"`(\w+)`(?: \((\d)\))?", functions):
            body = re.split(r"\n(?:    )?def ", text.split(f"def {function}(")[1])[0]
            assert not number or f"# {number}\n" in body, f"{file}: {function} ({number})"
            found += 1
    assert found > 15


DIGITS = """
rounds = 3
eval_every = 1
[method]
name = "fedavg"
lr = 0.1
local_steps = 2
[task]
name = "classification"
data = "digits"
partition = { name = "iid", clients = 4 }
"""


@pytest.mark.parametrize(
    "kind", ["projector", "compressor", "aggregator", "metric", "callback", "partition"]
)
def test_the_file_of_an_adding_page_runs_as_the_page_says(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One python block is the file, whose name the page gives; every command of the page is run with it."""
    page = (ROOT / f"docs/adding-{'an' if kind[0] in 'aeiou' else 'a'}-{kind}.md").read_text()
    (block,), name = (
        re.findall(r"```python\n(.*?)```", page, re.S),
        re.findall(r"`(\w+\.py)`", page)[0],
    )
    (tmp_path / name).write_text(block)
    (tmp_path / "digits.toml").write_text(DIGITS)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    lines = re.findall(r"^    (fedspan .*)$", page, re.M)
    try:
        for line in lines:
            monkeypatch.setattr(sys, "argv", shlex.split(line))
            with pytest.raises(SystemExit) as end:
                cli.main()
            assert end.value.code == 0, line + capsys.readouterr().err
    finally:
        for known in registry._known.values():
            known.pop(name.removesuffix(".py"), None)
        sys.modules.pop(name.removesuffix(".py"), None)
    told = capsys.readouterr().out
    assert ("FAIL" not in told and "every law holds" in told) or kind not in (
        "projector",
        "compressor",
        "aggregator",
    )
    assert {"metric": "top2", "callback": "stopped at round", "partition": "finished"}.get(
        kind, ""
    ) in told
