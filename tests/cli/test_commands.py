"""Commands are files of a folder: found, quick to list, and each with a help text; `list` describes every name."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedspan import cli
from fedspan.cli import _fields, app
from fedspan.core import registry
from fedspan.core.config import Engine
from fedspan.methods.ssf import SSF
from support.commands import main

COMMANDS = [
    "audit", "check-method", "compare", "data", "diagnose", "init", "list", "partition", "plan", "predict", "report",
    "reproduce", "roster", "run", "tune", "version",
]  # fmt: skip
KINDS = [(kind, name) for kind in registry.KINDS for name in registry.choices(kind)]


def test_every_file_is_a_command() -> None:
    assert list(app.commands()) == COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str) -> None:
    done = CliRunner().invoke(app.app, [name, "--help"])
    assert done.exit_code == 0
    assert done.output.startswith(f"Usage: root {name}")
    first = done.output.splitlines()[2].strip()
    assert first.endswith(".")
    assert len(first) <= 64  # `fedspan --help` shows it in full


def test_a_new_file_is_a_new_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "greet.py").write_text(
        'def command(name: str) -> None:\n    """Greet."""\n    print("hello", name)\n'
    )
    monkeypatch.setattr(cli, "__path__", [*cli.__path__, str(tmp_path)])
    importlib.invalidate_caches()
    monkeypatch.setattr(app, "app", app.build())
    assert main(monkeypatch, "greet", "you") == 0
    assert capsys.readouterr().out == "hello you\n"
    sys.modules.pop("fedspan.cli.greet")


def test_help_does_not_load_torch() -> None:
    code = (
        "import sys; sys.argv = ['fedspan', '--help']\n"
        "from fedspan.cli.app import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'numpy', 'rich.markdown'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(f"\n  {name} " in done.stdout for name in COMMANDS)


def test_no_arguments_show_the_help(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert main(monkeypatch) == 2
    assert capsys.readouterr().err.startswith("Usage: fedspan")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("rnu",), "Did you mean 'run'?"),
        (("run",), "Missing argument 'SPEC' (see fedspan run --help)"),
        (("plan",), "give a spec, or a model as in `fedspan plan --model DIR`"),
        (("list", "sff"), "there is no 'sff' (did you mean 'ssf'?)"),
        (("reproduce", "toy"), "Missing option '--out'"),
    ],
)
def test_a_mistake_is_one_line(
    words: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert main(monkeypatch, *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert told in line


def test_list_shows_every_name_of_every_kind(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert main(monkeypatch, "list") == 0
    first_words = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert {f"{kind}s" for kind in registry.KINDS} <= first_words
    assert {name for _, name in KINDS} <= first_words
    assert set(COMMANDS) <= first_words


def test_list_of_one_name_shows_its_settings(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert main(monkeypatch, "list", "ssf") == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("method ssf: SCAFFOLD inside")
    named = [
        line.split()[0] for line in lines if not line.startswith(" ")
    ]  # other lines go on in their columns
    axes = ["space", "drift", "local", "uplink", "server", "downlink"]
    others = [row[0] for row in _fields.settings(SSF) if row[0] not in axes]
    assert named == ["axis", *axes, "setting", *others]
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for kind in ("projector", "drift", "optimizer", "uplink", "server", "downlink"):
        assert all(name in text for name in registry.choices(kind))
    assert text.count("compressor") == 2  # stands for a choice of uplink and downlink
    assert main(monkeypatch, "list", "controls") == 0
    _, *lines = capsys.readouterr().out.splitlines()
    (rule,) = [line for line in lines if line.split()[0] == "rule"]
    assert '"exact" | "paper"' in rule
    assert main(monkeypatch, "list", "mean") == 0
    shown = capsys.readouterr().out
    assert "server mean" in shown
    assert "aggregator mean" in shown


def test_descriptions_come_from_comments_or_from_the_docstring() -> None:
    fields = {name: rest for name, *rest in _fields.settings(Engine)}
    assert fields["workers"] == [
        "int",
        "none",
        'Processes of `"pool"`. None takes as many as torch has threads.',
    ]
    assert {name: text for name, _, _, text in _fields.settings(SSF)}["local_steps"].startswith(
        "K: "
    )


@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_every_setting_is_described(kind: str, name: str) -> None:
    for setting, _, _, text in _fields.settings(registry.choices(kind)[name]):
        assert text, f"{setting} of the {kind} {name} has neither a comment nor an entry in `Args:`"


def test_versions(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert main(monkeypatch, "version") == 0
    assert capsys.readouterr().out.startswith("fedspan 0.")
