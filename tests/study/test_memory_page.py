"""Client memory as a cost: in tables, figures and on the page."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from rich.console import Console

from fedspan.study import conduct, report, results, tables
from fedspan.study.page import by_memory
from fedspan.study.request import requested
from support.browsing import SHORT, browse, drawn
from support.loops import SMALL

BASE: dict[str, Any] = {
    "rounds": 2,
    "method": {"name": "fedavg", "lr": 0.1, "local_steps": 2},
    "batch_size": 16,
}
TOY = {"task": SMALL}
IMAGES = {
    "task": {
        "name": "classification",
        "data": "digits",
        "partition": {"name": "iid", "clients": 3},
    },
    "projection": {"min_numel": 64},
    "engine": {"simulate": "loop"},
}


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods on images, and two on the toy."""
    place = tmp_path_factory.mktemp("shown")
    for name, more in (("images", IMAGES), ("toy", TOY)):
        spec = place / f"{name}.toml"
        spec.write_text(tomli_w.dumps(BASE | more))
        study = requested(
            spec, methods=["fedavg,scaffold", "ssf:rank=0.5 as SSF"], seeds=2, budget=["rounds=2"]
        )
        formats = ["html", "md", "csv"]
        conduct.conduct(
            study, place / name, resume=False, line="", console=Console(quiet=True), formats=formats
        )
    return place


def chart_of(page: Path) -> dict[str, Any]:
    (text,) = re.findall(
        r'class="chart marks".*?application/json">(.*?)</script>', page.read_text(), re.S
    )
    found: dict[str, Any] = json.loads(text)
    return found


def test_tables_have_a_column(shown: Path) -> None:
    lines = list(csv.DictReader((shown / "images/results.csv").read_text().splitlines()))
    sizes = [int(line["client_memory_bytes"]) for line in lines]
    assert len(set(sizes)) == 3
    text = (shown / "images/tables.md").read_text()
    assert text.count(tables.MEMORY) == 2  # of results and runs
    for line, size in zip(lines, sizes, strict=True):
        assert f"| {size / 1e6:.4g} |" in next(
            row for row in text.splitlines() if row.startswith(f"| {line['method']} ")
        )
    assert tables.MEMORY_NOTE in text


def test_the_toy_has_neither_column_nor_chart(shown: Path) -> None:
    assert tables.MEMORY not in (shown / "toy/tables.md").read_text()
    for name in ("tables.md", "index.html"):
        assert "client memory" not in (shown / "toy" / name).read_text().lower()
    assert 'class="chart"' in (shown / "toy/index.html").read_text()


def test_the_chart_has_one_mark_a_method(shown: Path) -> None:
    drawing = chart_of(shown / "images/index.html")
    lines = list(csv.DictReader((shown / "images/results.csv").read_text().splitlines()))
    assert list(drawing["axes"]) == ["memory"]
    for one, line in zip(drawing["series"], lines, strict=True):
        assert one["x"]["memory"] == [
            pytest.approx(int(line["client_memory_bytes"]) / 1e6, rel=1e-5)
        ]
        accuracy = one["y"]["accuracy"]
        assert accuracy["mean"] == [pytest.approx(100 * float(line["accuracy"]), rel=1e-5)]
        assert accuracy["low"][0] <= accuracy["mean"][0] <= accuracy["high"][0]


def test_a_report_of_runs_has_them_too(shown: Path, tmp_path: Path) -> None:
    report.report([shown / "images/runs"], tmp_path, ["html", "md"], None, "")
    assert tables.MEMORY in (tmp_path / "tables.md").read_text()
    assert len(chart_of(tmp_path / "index.html")["series"]) == 3


def test_what_is_not_known_has_no_mark(shown: Path) -> None:
    found = results.load(shown / "images")
    (part,), entries = found.study.parts, found.entries["comparison"]
    sizes = [None, 2_000_000, None]
    known = [
        dataclasses.replace(entry, client_memory=size)
        for entry, size in zip(entries, sizes, strict=True)
    ]
    drawing = by_memory(part, known)
    assert drawing is not None
    assert [(one["name"], one["x"]) for one in drawing["series"]] == [
        ("scaffold", {"memory": [2.0]})
    ]
    grid = tables.results(part, known)
    assert [row[grid.header.index(tables.MEMORY)] for row in grid.rows] == ["", "2", ""]


@drawn
def test_marks_and_names_have_room(shown: Path) -> None:
    code = """
        const box = (n) => n.getBoundingClientRect();
        const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
        const names = all('.marks text.name'), marks = all('.marks .plot .mark'), plot = box(one('.marks .plot svg'));
        const pieces = [...names, ...marks].map(box);
        const overlaps = names.flatMap((n, i) => pieces.filter((b, j) => i !== j && meet(box(n), b))).length;
        const out = pieces.filter((b) => b.left < plot.left || b.right > plot.right).length;
        const keys = texts('.marks .key'), titles = texts('.marks .label');
        return { overlaps, out, marks: marks.length, whiskers: all('.marks .whisker').length > 0, keys, titles };
    """
    views = [("", 1100), ("", 340), ("m.y=loss&m.band=0&m.off=0&y=accuracy", 340)]
    wide, narrow, other = browse(shown / "images/index.html", SHORT + code, *views)
    assert wide == narrow
    assert (wide["overlaps"], wide["out"], wide["marks"], wide["whiskers"]) == (0, 0, 3, True)
    assert wide["keys"] == ["fedavg", "scaffold", "SSF"]
    assert wide["titles"] == [tables.MEMORY, "accuracy, %"]
    assert (other["titles"], other["marks"], other["whiskers"]) == (
        [tables.MEMORY, "test loss"],
        2,
        False,
    )
