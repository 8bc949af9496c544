"""`fedspan report`: runs found anywhere, named and compared, and what its tables say."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedspan
from fedspan.api.run import run
from fedspan.core.errors import CheckpointError, FedspanError, SpecError
from fedspan.core.json_log import JsonLog
from fedspan.core.spec import Spec
from fedspan.engine import history
from fedspan.methods.fedavg import FedAvg
from fedspan.nn.models import mlp
from fedspan.study import figures, report, tables
from fedspan.study.curves import Series, Tail, find, labels, pareto, reach
from fedspan.study.model import Case, Part, Variant, study_of
from fedspan.study.page import chart
from fedspan.study.report import titled
from fedspan.study.results import Entry
from fedspan.study.verdict import problem
from fedspan.tasks.regression import Regression
from support.loops import SMALL, Interrupt
from support.runs import TABLE, line, rows_of, series_of


def entries_of(series: list[Series]) -> tuple[Part, list[Entry]]:
    """A part whose variants are the series."""
    variants = [Variant(one.label, one.label, one.color, {}, {}) for one in series]
    part = Part(name="p", base={}, variants=variants, metric="loss", goal="min")
    ends = [one.curve("loss") for one in series]
    return part, [
        Entry(0, one.label, one.thin(), end.tail(1), end.best("min"))
        for one, end in zip(series, ends, strict=True)
    ]


def test_a_row_counts_that_all_seeds_have_which_came_so_far() -> None:
    """One seed was made longer at round 5 and one diverged at 6."""
    rows = [
        {"round": t, "up_bytes": t, "down_bytes": 0, "seconds": 1.0 * t, "loss": float(t)}
        for t in range(0, 9, 2)
    ]
    odd = sorted([*rows, rows[2] | {"round": 5}], key=lambda row: row["round"])
    gone = [*rows[:3], rows[3] | {"diverged": True, "seconds": 30.0}]
    curve = series_of([odd, rows, gone]).curve("loss")
    assert curve.rounds.tolist() == [0, 2, 4, 6, 8]
    assert curve.diverged == [None, None, 6]
    assert np.isnan(curve.values[2]).tolist() == [False, False, False, True, True]
    assert curve.spent["seconds"].tolist() == [
        0,
        2,
        4,
        14,
        14,
    ]  # what was spent does not fall when a seed drops out
    assert curve.tail(2) == Tail(7.0, 0.0, 1, 3)
    assert curve.tail(1).text("8", "0") == "8 ± 0 (1 of 3 diverged)"


def test_a_seed_that_failed_is_counted() -> None:
    rows = [
        {"round": t, "up_bytes": t, "down_bytes": 0, "seconds": 0.0, "loss": 1.0} for t in range(3)
    ]
    curve = series_of([rows, []]).curve("loss")
    assert curve.tail(1).text("1", "") == "1 (1 of 2 failed)"
    nothing = series_of([[], []]).curve("loss")
    assert nothing.tail(1).text("", "") == nothing.best("min").text("", "") == "failed"
    assert nothing.spent["up"].tolist() == [0]


def test_the_pareto_front_is_what_nobody_beats_for_less() -> None:
    """The dear one is below the cheap one's line from 40 bytes on, though the cheap one has rows between its own."""
    cheap = line("cheap", [1.0, 0.9, 0.8, 0.7, 0.6, 0.55, 0.5, 0.45], up=10)
    dear = line("dear", [1.0, 0.4, 0.2], up=40)
    found = pareto([cheap, dear], "loss", "min", "up")
    assert [(number, cost) for number, cost, _ in found] == [
        (1, 40.0),
        (1, 80.0),
    ]  # 0.85 at 10 bytes, on the way to 0.4
    slow = line("slow", [1.0, 0.99, 0.4, 0.2], up=20)
    found = pareto([cheap, slow], "loss", "min", "up")
    assert [(number, cost) for number, cost, _ in found] == [(0, 10), (0, 20), (1, 40), (1, 60)]
    assert reach([cheap, slow], "loss", "min", "total") == {0: (20, 40), 1: (80, 120)}
    assert pareto([cheap, slow], "loss", "max", "up") == []  # they only get worse
    still = line("still", [1.0, 0.5, 0.5, 0.4, 0.4])
    assert [cost for _, cost, _ in pareto([still], "loss", "min", "up")] == [
        10,
        30,
    ]  # the same for more is no gain


def test_what_diverged_is_not_pareto_optimal() -> None:
    runs = [rows_of([1.0, 0.1, 0.01]), rows_of([1.0, 0.1, None])]
    both = Series.of("x", "", {"rounds": 2}, (0, 1), runs)
    assert [cost for _, cost, _ in pareto([both], "loss", "min", "up")] == [10]


def test_runs_are_named_by_what_sets_them_apart() -> None:
    one, two = (TABLE | {"method": TABLE["method"] | {"lr": lr}} for lr in (0.1, 0.2))
    fedavg = TABLE | {"method": {"name": "fedavg", "lr": 0.3}}
    assert labels([one, two, fedavg]) == ["ssf, lr 0.1", "ssf, lr 0.2", "fedavg"]
    hadamard = TABLE | {"method": TABLE["method"] | {"space": {"name": "hadamard", "rank": 3}}}
    assert labels([TABLE, hadamard]) == ["ssf, gaussian", "ssf, hadamard"]
    assert labels([TABLE, TABLE | {"rounds": 99, "seed": 5}]) == ["ssf", "ssf"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods under two seeds, the same one on another task, and one that was stopped."""
    place = tmp_path_factory.mktemp("runs")
    run(Spec.from_table(TABLE), place / "ssf", seeds=2)
    run(Spec.from_table(TABLE), place / "again")
    run(
        Spec.from_table(TABLE | {"method": {"name": "fedavg", "lr": 0.02}}),
        place / "fedavg",
        seeds=2,
    )
    with pytest.raises(KeyboardInterrupt):
        run(
            Spec.from_table(TABLE | {"task": SMALL | {"het": 0.0}}),
            place / "even",
            callbacks=[Interrupt(5)],
        )
    return place


def test_seeds_are_one_series_and_tasks_are_apart(runs: Path) -> None:
    (het, shifted), (even, flat) = sorted(find([runs]), key=lambda part: -len(part[1]))
    assert (het, even) == ("het 1", "het 0")
    assert [(one.label, one.seeds) for one in shifted] == [("ssf", (0, 1)), ("fedavg", (0, 1))]
    assert flat[0].unfinished == {0: 4}
    assert shifted[0].curve("rel_err").values.shape == (2, 7)


def test_a_report_of_runs(runs: Path, tmp_path: Path) -> None:
    files = report.report([runs], tmp_path, ["html", "md", "csv"], None, "fedspan report x")
    assert [path.name for path in files] == ["index.html", "tables.md", "results.csv"]
    text = (tmp_path / "tables.md").read_text()
    assert "## het 1" in text
    assert "- ssf: seed 0 is at round 4 of 12" in text
    lines = list(csv.DictReader((tmp_path / "results.csv").read_text().splitlines()))
    found = [(one["part"], one["method"], one["seeds"], one["client_state_bytes"]) for one in lines]
    assert found == [
        ("het 1", "ssf", "2", "96"),
        ("het 1", "fedavg", "2", "0"),
        ("het 0", "ssf", "1", "96"),
    ]
    page = (tmp_path / "index.html").read_text()
    assert "fedspan report x" in page
    assert "[method.space]" in page  # the spec
    for outside in ("http://", "https://", "src=", "<link", "@import", "url("):
        assert outside not in page.replace("http://www.w3.org/2000/svg", "").replace(
            "url(#inside", ""
        ), outside


def test_a_report_of_a_fit_and_of_any_metric(tmp_path: Path) -> None:
    """`fit` knows no task; what its clients keep is recorded by the run."""
    x, y = torch.randn(30, 1, 8, 8), torch.arange(30) % 3
    clients = [(x[part], y[part]) for part in torch.arange(30).split(10)]
    method = FedAvg(lr=0.1, local_steps=2)
    fedspan.fit(
        mlp((1, 8, 8), 3), clients, method=method, rounds=3, test=(x, y), run_dir=tmp_path / "fit"
    )
    report.report([tmp_path / "fit"], tmp_path / "out", ["md"], None, "")
    text = (tmp_path / "out" / "tables.md").read_text()
    assert "last accuracy, %" in text
    assert "client state" in text
    report.report([tmp_path / "fit" / "history.jsonl"], tmp_path / "out", ["md"], "loss", "")
    assert "last test loss" in (tmp_path / "out" / "tables.md").read_text()


def test_a_row_without_the_metric_is_a_gap(tmp_path: Path) -> None:
    row = {"round": 0, "up_bytes": 0, "down_bytes": 0, "seconds": 0.0, "loss": 2.0}
    rows = [
        row,
        {k: v for k, v in row.items() if k != "loss"} | {"round": 1},
        row | {"round": 2, "loss": 1.0},
    ]
    header = {"spec": {"seed": 0, "rounds": 2, "method": {"name": "fedavg"}}}
    JsonLog(tmp_path / "history.jsonl", [header, *rows])
    report.report([tmp_path], tmp_path / "out", ["md"], None, "")
    assert "| 1.00e0 |" in (tmp_path / "out" / "tables.md").read_text()


def test_mistakes_are_named(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="does not exist"):
        report.report([tmp_path / "none"], tmp_path, ["md"], None, "")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"holds no history.jsonl with rows"):
        report.report([tmp_path / "empty"], tmp_path, ["md"], None, "")
    with pytest.raises(SpecError, match="`format` must be one of csv, html, md, png, got 'pdf'"):
        report.report([runs], tmp_path, ["pdf"], None, "")
    with pytest.raises(FedspanError, match="`metric` must be one of loss, rel_err, got 'accuracy'"):
        report.report([runs], tmp_path, ["md"], "accuracy", "")


def test_long_lines_are_thinned_and_all_are_shown() -> None:
    long = [line(f"m{n}", [1.0 + n / (t + 1) for t in range(3000)]) for n in range(12)]
    long.append(line("gone", [1.0, 1e9, None]))
    data = chart(*entries_of(long))
    assert max(len(one["x"]["round"]) for one in data["series"]) <= 240
    assert [one["marker"] for one in data["series"]] == list(
        range(13)
    )  # every line is shown, with its own marker
    assert data["series"][-1]["gone"] == ["seed 0 diverged at round 2"]
    assert data["series"][-1]["y"]["loss"]["whole"] == 2
    assert data["axes"]["up"]["label"] == "kB sent up, all clients"
    assert data["series"][0]["x"]["up"][:3] == [0, 0.01, 0.02]
    assert [one["dash"] for one in data["series"][:3]] == [0, 1, 2]  # all of one color
    json.dumps(data, allow_nan=False)


def test_numbers_in_tables() -> None:
    grid = tables.runs(*entries_of([line("a", [1.0, 0.5]), line("gone", [1.0, None])]))
    header, rows = grid.header, grid.texts()
    assert "client state, kB" not in header
    assert rows[0][header.index("last test loss")] == "5.00e-1"
    assert rows[1][header.index("last test loss")] == "diverged"
    assert rows[1][header.index("best test loss")] == "1.00e0"
    assert tables.shown("perplexity", line("a", [20.0, 17.44]).curve("loss").tail(1)) == "17.4"


def test_many_methods_are_counted_in_the_title() -> None:
    task = {"name": "regression", "het": 2.0}
    table: dict[str, Any] = {
        "base": {"rounds": 2, "task": task, "method": {"name": "fedavg", "lr": 0.1}}
    }
    few, many = (
        study_of(table | {"variants": {f"m{i}": {"label": f"M{i}"} for i in range(n)}})
        for n in (2, 9)
    )
    assert titled(few) == "M0 and M1 on the regression problem, het 2"
    assert titled(many) == "9 methods on the regression problem, het 2"


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (
            {"name": "classification", "data": "mnist", "partition": {"name": "iid", "clients": 3}},
            "MNIST, 3 clients",
        ),
        ({"name": "classification", "data": "digits", "partition": {"name": "natural"}}, "digits"),
        ({"name": "custom", "model": "1f", "data": "a0"}, "your own model and data"),
        ({"name": "custom", "model": "1f", "data": "a0", "clients": 10}, "10 clients"),
        (
            {"name": "regression", "het": "$het", "clients": 20},
            "the regression problem, 20 clients",
        ),
    ],
)
def test_a_title_names_the_problem_in_words(task: dict[str, Any], words: str) -> None:
    assert problem(task) == words


def test_every_line_lies_in_its_panel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Panels share their y axis; the second row of the part ends far below the first."""
    kept: list[Any] = []
    monkeypatch.setattr(figures, "save", lambda figure, path: kept.append(figure) or path)
    part, entries = entries_of([line("high", [1.0, 0.9, 0.8]), line("low", [1.0, 0.1, 1e-3])])
    rows = [Case({"n": n}) for n in (0, 1)]
    placed = [dataclasses.replace(entry, row=n) for n, entry in enumerate(entries)]
    figures.draw(dataclasses.replace(part, rows=rows), placed, tmp_path / "x")
    for axis in kept[0].axes:
        low, high = axis.get_ylim()
        for drawn in axis.get_lines():
            assert low <= min(drawn.get_ydata()) <= max(drawn.get_ydata()) <= high
            assert drawn.get_marker() != "None"


def test_a_report_builds_no_task(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads what the runs have recorded, also of an interrupted one; a run without a record has no such column."""
    monkeypatch.setattr(Regression, "build", lambda *_: pytest.fail("a task was built"))
    report.report([runs], tmp_path, ["md"], None, "")
    assert "client state, kB" in (tmp_path / "tables.md").read_text()
    header, rows = history.read(runs / "again" / history.NAME)
    for costs, words in (({}, ""), ({"client_state": "many"}, "'client_state' is 'many'")):
        old = tmp_path / "old" / history.NAME
        old.parent.mkdir(exist_ok=True)
        JsonLog(old, [{"spec": header["spec"], "costs": costs}, *rows])
        if not words:
            report.report([old], tmp_path, ["md"], None, "")
            assert "client state, kB" not in (tmp_path / "tables.md").read_text()
            continue
        with pytest.raises(CheckpointError, match=words):
            report.report([old], tmp_path, ["md"], None, "")
