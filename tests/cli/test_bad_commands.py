"""Command lines that cannot be followed end in one line and a code, and leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fedspan
from support.commands import main

SPEC = """rounds = 2
batch_size = "full"
method = { name = "fedavg", lr = 0.01 }
task = { name = "regression", dim = 6, clients = 4, samples = 8 }
"""
LONG = "x" * 5000
COMPARE = ("compare", "s.toml", "--methods", "fedavg", "--out")
BASE = f"""[base]
{SPEC}
[variants.a]
method = {{ name = "fedavg", lr = 0.01 }}
"""
COMPARISONS = [
    ("variants = 3", "`variants` must be a table, got 3"),
    ("variants = []", "`variants` must be a table, got []"),
    ("variants = {}", "needs [base] and [variants.NAME]"),
    ("[variants.a]\n", "a comparison needs [base]"),
    ("base = 3\n[variants.a]\n", "`base` must be a table, got 3"),
    ("base = { task = 3 }\n[variants.a]\n", "`rounds` is missing"),
    (BASE + "grid = 3", "`variants.a.grid` must be a table, got 3"),
    (BASE + 'grid = { "method.lr" = 3 }', "`variants.a.grid.method.lr` must be a list, got 3"),
    (BASE + 'grid = { "method.lr" = [] }', "`variants.a.grid` has no values for 'method.lr'"),
    (BASE + 'grid = { "method.lrr" = [1.0] }', "has no key 'lrr'"),
    (BASE + "label = 3", "`variants.a.label` must be a text, got 3"),
    (BASE + "[variants]\nb = 3", "`variants.b` must be a table, got 3"),
    *(
        (f"{key} = {value}\n" + BASE, words)
        for key, value, words in (
            ("parts", "3", "`parts` must be a table"),
            ("parts", "{}", "a comparison has no part"),
            ("parts", "{ x = 3 }", "`parts.x` must be a table"),
            ("parts", "{ x = { variants = 3 } }", "`parts.x.variants` must be a list"),
            ("parts", "{ x = { variants = [3] } }", "variant of [parts.x]"),
            ("parts", "{ x = { grid = [] } }", "`parts.x.grid` must be a table"),
            ("scales", "3", "`scales` must be a table"),
            ("scale", "3", "`scale` must be a text"),
            ("seeds", "0", "whole number of at least 1, got 0"),
            ("seeds", "'a'", "whole number of at least 1, got 'a'"),
            ("rows", "3", "`rows` must be a list"),
            ("rows", "[3]", "`rows[0]` must be a table"),
            ("rows", "[{ target = 'a' }]", "`rows: target` must be a number"),
            ("title", "3", "`title` must be a text"),
            ("metric", "3", "`metric` must be a text"),
            ("metric", "'nope'", "more or less of the metric 'nope' is better is not known"),
            ("goal", "'up'", "`goal`"),
            ("tail", "'a'", "`tail`"),
            ("tail", "99999", "give at most 2"),
            ("budget", "3", "`budget` must be a text"),
            ("budget", "['up=1']", "such as 10MB, got '1'"),
            ("set", "3", "`set` must be a table"),
            ("set", "{ rounds = 'a' }", "`rounds` must be a whole number"),
            ("claims", "3", "`claims` must be a list"),
            ("within", "'a'", "`within`"),
            ("nope", "3", "key of a comparison"),
        )
    ),
]
MISTAKES: list[tuple[tuple[str, ...], str]] = [
    (("run", "s.toml", "--run-dir", ""), "argument 4 is empty"),
    (("run", "s.toml", "--run-dir", LONG), "--run-dir is longer than file names may be"),
    (("run", LONG), "`spec` is longer"),
    (("run", "s.toml", "--set", "device=meta"), "`device`"),
    (("run", "s.toml", "--set", "batch_size=100000000000000000000"), "`batch_size`"),
    (("run", "s.toml", "--set", "task.clients=1000000000"), "memory"),
    (("run", "s.toml", "--set", "engine.states_dir=''"), "states_dir"),
    (("run", "s.toml", "--set", "method.name=FedAvgg"), "did you mean 'fedavg'"),
    (("partition", "s.toml", "--set", "task.clients=100000000000"), "memory"),
    (("report", "nothere"), "'nothere' does not exist; give directories that runs were written to"),
    (("report", "nothere", "--out", "o"), "'nothere' does not exist"),
    (("report", LONG), "longer than file names may be"),
    (("report", "r1", "--out", "s.toml"), "'s.toml' is a file; give a directory"),
    (("report", "r1", "--out", "s.toml/x"), "cannot write"),
    ((*COMPARE, "x" * 300), "File name too long"),
    ((*COMPARE, "o", "--budget", "rounds=10000000000"), "`rounds` must be at most"),
    ((*COMPARE, "o", "--goal", "up"), "--goal"),
    (("init", "x" * 300), "File name too long"),
    *(
        (("init", name), "is the name of an installed package")
        for name in ("torch", "fedspan", "json", "a/numpy")
    ),
    *(
        (("init", name), "must be a Python name")
        for name in ("class", "async", "1a", "a b", "é", "x.py", "CON", "a_")
    ),
    (("init", "tests"), "is the name of a folder of the project"),
    (
        (*COMPARE, "o", "--tail", "99999"),
        "--tail is 99999, but a run of 2 rounds has 2 evaluations after its start",
    ),
    ((*COMPARE, "o", "--tail", "3"), "give at most 2"),
    *(
        (("compare", f"c{number}.toml", "--out", "o"), words)
        for number, (_, words) in enumerate(COMPARISONS)
    ),
    (("data", "mnist"), "write `fedspan data get mnist`"),
    (("run", "."), "'.' is a directory; give the spec file in it"),
    (("run", "s.toml", "--set", "lr=0.1"), "`[spec]` has no key 'lr'; it is `method.lr`"),
    (("run", "s.toml", "--set", "het=0.1"), "`[spec]` has no key 'het'; it is `task.het`"),
    (("tune", "s.toml", "--budget", "2MB"), "a budget is written up=10MB, total=50MB"),
    (("tune", "s.toml", "--budget", "all=2MB"), "must be one of rounds, total, up, got"),
    (("init", "s.toml/foo"), "Not a directory; choose another place, or check its rights"),
    (
        ("run", "s.toml", "--run-dir", "r1", "--resume", "--set", "rounds=1"),
        "`rounds` is 1, but the run in 'r1' is at round 2",
    ),
    (("roster", LONG), "File name too long"),
    (("check-method", LONG), "File name too long"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("commands")
    (place / "s.toml").write_text(SPEC)
    for number, (text, _) in enumerate(COMPARISONS):
        (place / f"c{number}.toml").write_text(text)
    fedspan.run(place / "s.toml", place / "r1", progress=False)
    return place


@pytest.mark.parametrize(("words", "said"), MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_is_one_line_and_leaves_nothing(
    words: tuple[str, ...], said: str, made: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(made)
    before = sorted(made.rglob("*"))
    assert main(monkeypatch, *words) == 2
    told = capsys.readouterr().err.strip()
    assert "\n" not in told
    assert len(told) < 500
    assert said in told
    assert sorted(made.rglob("*")) == before


def test_a_plan_of_privacy_is_refused_before_its_tables(
    made: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)  # as if it were not installed
    assert main(monkeypatch, "plan", str(made / "s.toml"), "--epsilon", "8") == 2
    said = capsys.readouterr()
    assert said.err == "error: dp_accounting is not installed; pip install 'fedspan[privacy]'\n"
    assert said.out == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_output_that_cannot_be_written(made: Path) -> None:
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "fedspan", "list"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: the output cannot be read or written: No space left")
    assert len(done.stderr.splitlines()) == 1


def test_long_names_of_metrics_are_folded_and_not_cut(capsys: Any) -> None:
    from fedspan.cli._tables import console
    from fedspan.core.terminal import table

    heads = [
        "seed",
        "status",
        "round",
        *(f"{part}{name}" for part in ("", "validation_") for name in ("accuracy", "auroc")),
    ]
    rows = [["0", "finished", "100", *["0.12345"] * 4]]
    console.print(table(heads, rows, width=console.width), width=50)
    shown = capsys.readouterr().out
    assert "…" not in shown


def test_a_table_that_is_too_wide_goes_on_in_a_second_one(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedspan.cli import _tables

    monkeypatch.setattr(_tables.console, "_width", 80)
    names = [f"{part}{one}" for part in ("", "clients_", "worst_") for one in ("auroc", "accuracy")]
    heads = ["seed", "status", "round", *names, "up", "down", "seconds"]
    cells = [
        "0",
        "stopped at round 40: no better",
        "40",
        *["0.1234"] * 6,
        "1.2 MB",
        "1.2 MB",
        "9.5",
    ]
    _tables.show(heads, [cells], left=2)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    for word in (*heads, *["stopped", "at", "round", "40:", "no", "better", "0.1234", "9.5"]):
        assert word in shown.split()
    assert shown.count("seed ") == 2
