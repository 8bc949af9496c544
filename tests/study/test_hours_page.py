"""The axis of hours on a page: recorded by a clock, or computed by the page from recorded bytes and steps."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import fedspan
from fedspan.study import page, report, results
from support.browsing import SHORT, browser_page, drawn
from support.loops import RUN

HOURS = Path(page.WEB) / "hours.js"
ALIKE = {"up_mbit": 0.002, "down_mbit": 0.002, "latency": 0.0, "step_seconds": 0.3}
NODE = shutil.which("node")


@pytest.fixture(scope="module", params=["clock", "no clock"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of full participation, whose clients all have one link."""
    place = tmp_path_factory.mktemp("runs")
    table = {"clients_per_round": 7, "epochs": 2.0}
    table |= {"federation": ALIKE} if request.param == "clock" else {}
    for name in ("fedavg", "ssf"):
        method = {"name": name, "lr": 0.02, "local_steps": 3} | (
            {"rank": 4} if name == "ssf" else {}
        )
        fedspan.run(RUN | table | {"method": method}, run_dir=place / name, progress=False)
    return place


def data_of(file: Path) -> dict[str, Any]:
    text = file.read_text("utf-8").partition('<script type="application/json">')[2]
    found: dict[str, Any] = json.loads(text.partition("</script>")[0])
    return found


@pytest.fixture
def drawing(runs: Path, tmp_path: Path) -> dict[str, Any]:
    """The data of the page's chart."""
    (file,) = report.report([runs], tmp_path, ["html"], None, "")
    return data_of(file)


def test_the_page_has_recorded_hours_bytes_and_steps(drawing: dict[str, Any], runs: Path) -> None:
    clocked = "hours" in fedspan.load(runs / "ssf").history[-1]
    assert "hours" in drawing["axes"]
    for line in drawing["series"]:
        result = fedspan.load(runs / line["name"])
        assert (line["cohort"], line["steps"]) == (7, 4)  # two passes over 9 rows, in batches of 4
        if clocked:
            hours = [row["hours"] for row in result.history]
            assert line["x"]["hours"] == pytest.approx(hours, rel=1e-5)
        else:
            assert "hours" not in line["x"]


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_the_page_computes_the_hours_of_the_clock(drawing: dict[str, Any]) -> None:
    """With the link and step of the clock it finds the same hours, and the method that is first."""
    own = f"""
        const data = {json.dumps(drawing)};
        for (const {{ x }} of data.series)
          for (const key in x) if (typeof x[key] === "number") x[key] = x.round.map((t) => t * x[key]);
        const of = data.series.map((s) => hoursOf(s, data.bytes, {ALIKE["up_mbit"]}, {ALIKE["step_seconds"]}));
        const rows = (s, n) => s.y.loss.mean.map((mean, at) => ({{ mean, x: of[n][at] }}));
        const lines = data.series.map((series, n) => ({{ series, rows: rows(series, n) }}));
        const target = shared(lines, -1);
        console.log(JSON.stringify({{ of, target, reached: reached(lines, target, -1) }}));
    """
    command = [NODE or "", "-e", HOURS.read_text("utf-8") + own]
    found = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    lines = drawing["series"]
    for line, hours in zip(lines, found["of"], strict=True):
        if "hours" in line["x"]:
            assert hours == pytest.approx(line["x"]["hours"], rel=2e-3)
    ends = [line["y"]["loss"]["mean"] for line in lines]
    assert found["target"] == pytest.approx(max(map(min, ends)), rel=0.01)
    assert found["target"] >= max(map(min, ends))
    first = {}
    for line, hours, loss in zip(lines, found["of"], ends, strict=True):
        there = [h for h, value in zip(hours, loss, strict=True) if value <= found["target"]]
        first[line["name"]] = there[0]
    assert [one["name"] for one in found["reached"]] == sorted(first, key=lambda name: first[name])


def test_hours_are_saved_with_a_comparison(tmp_path: Path) -> None:
    base = RUN | {"federation": ALIKE}
    two = {name: {"name": name, "lr": 0.02} for name in ("fedavg", "scaffold")}
    found = fedspan.compare(two, base, run_dir=tmp_path / "out", seeds=2, progress=False)
    again = results.load(tmp_path / "out")
    for entry in again.entries[again.study.parts[0].name]:
        assert entry.series.spent["hours"][-1] > 0
        assert (entry.clients_per_round, entry.local_steps) == (3, 10)
    assert found.plot("hours").get_xlabel() == "hours"
    del base["federation"]
    plain = fedspan.compare(two, base, seeds=1, progress=False)
    with pytest.raises(fedspan.SpecError, match="only runs with a `federation`"):
        plain.plot("hours")


@drawn
def test_sliders_move_the_lines_and_name_the_first(runs: Path, tmp_path: Path) -> None:
    (file,) = report.report([runs], tmp_path, ["html"], None, "")
    with browser_page(file.as_uri() + "#x=hours&link=0.001&step=0.001") as view:
        slow = view.evaluate(f"() => {{ {SHORT} return texts('.first')[0] }}")
        assert "reaches" in slow
        assert "first, after" in slow
        view.evaluate(
            "() => { const one = document.querySelector('.hours input[type=range]'); one.value = 4;"
            " one.dispatchEvent(new Event('input')); }"
        )
        assert view.evaluate(f"() => {{ {SHORT} return texts('.first')[0] }}") != slow
        assert "link=10000" in view.url
