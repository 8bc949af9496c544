"""What a reader does with a page: reads the verdict, searches, switches, links, downloads, and reads it on a phone."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import tomli_w
from rich.console import Console

from fedspan.study import conduct, report
from fedspan.study.request import requested
from support.browsing import SHORT, browser_page, drawn
from support.runs import TABLE

TOY = Path(__file__).parents[2] / "docs/results/toy"
QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the committed study, which has nine parts with several rows."""
    place = tmp_path_factory.mktemp("toy")
    (file,) = report.report([TOY], place, ["html"], None, "")
    return file


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a comparison that was resumed."""
    place = tmp_path_factory.mktemp("compared")
    (place / "base.toml").write_text(tomli_w.dumps(TABLE))
    study = requested(
        place / "base.toml",
        methods=["ssf:drift.correction=always as SSF,fedavg as FedAvg,scaffold as SCAFFOLD"],
        seeds=2,
    )
    for line in (
        "fedspan compare base.toml --out out",
        "fedspan compare base.toml --resume --out out",
    ):
        conduct.conduct(
            study,
            place / "out",
            resume="--resume" in line,
            formats=["html"],
            line=line,
            console=QUIET,
        )
    return place / "out" / "index.html"


def test_the_first_command_stands_below(compared: Path) -> None:
    text = compared.read_text()
    assert "How this page was made" in text
    assert '<pre class="command">fedspan compare base.toml --out out</pre>' in text


def test_commands_that_change_a_comparison_are_added(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(tomli_w.dumps(TABLE))
    lines = ["fedspan compare base.toml", "fedspan compare base.toml --seeds 2 --resume"]
    for seeds, line in enumerate(lines, start=1):
        study = requested(tmp_path / "base.toml", seeds=seeds)
        conduct.conduct(
            study, tmp_path / "o", resume=seeds > 1, formats=["html"], line=line, console=QUIET
        )
    text = (tmp_path / "o" / "index.html").read_text()
    assert f'<pre class="command">{lines[0]}\n{lines[1]}</pre>' in text
    again = requested(tmp_path / "o" / "study.toml")
    assert again.parts[0].seeds == 2


@drawn
@pytest.mark.parametrize("name", ["toy", "compared"])
def test_the_verdict_comes_first(name: str, request: pytest.FixtureRequest) -> None:
    with browser_page(request.getfixturevalue(name).as_uri()) as page:
        title, first = page.evaluate(
            f"() => {{ {SHORT} return all('main > *').slice(0, 2).map((n) => n.className) }}"
        )
        assert (title, first) == ("", "verdict")
        tops = [
            page.locator(one).first.bounding_box()["y"]
            for one in (".verdict", ".chart svg", "table")
        ]
        assert tops == sorted(tops)


@drawn
def test_the_search_keeps_the_rows_with_every_word(compared: Path) -> None:
    with browser_page(compared.as_uri()) as page:
        rows = page.locator("table").first.locator("tbody tr:visible")
        assert rows.count() == 3
        page.get_by_label("Search the tables").fill("scaf")
        assert rows.count() == 1
        assert rows.first.locator("th").text_content() == "SCAFFOLD"
        assert page.locator(".find output").text_content() == "1 of 3 rows"
        page.reload()
        assert page.get_by_label("Search the tables").input_value() == "scaf"
        assert rows.count() == 1
        page.get_by_label("Search the tables").fill("")
        assert rows.count() == 3


@drawn
def test_the_row_of_a_part_is_chosen(toy: Path) -> None:
    with browser_page(toy.as_uri()) as page:
        chart = page.locator("#part-2 .chart")
        before = chart.locator("path.mean").first.get_attribute("d")
        chart.get_by_label("het 2, rank 20", exact=True).check()
        assert chart.locator(".plot path.mean").first.get_attribute("d") != before
        assert page.evaluate("location.hash") == "#2.row=2"
        page.reload()
        assert chart.get_by_label("het 2, rank 20", exact=True).is_checked()
        names = chart.locator(".keys li:visible").all_text_contents()
        assert len(names) == chart.locator(".plot path.mean").count() == 7


@drawn
def test_a_reload_keeps_axes_and_lines(compared: Path) -> None:
    with browser_page(compared.as_uri()) as page:
        page.get_by_label("Seconds", exact=True).check()
        page.get_by_label("test loss", exact=True).check()
        page.locator(".key", has_text="FedAvg").click()
        page.reload()
        assert page.locator(".label").all_text_contents() == ["seconds of training", "test loss"]
        assert page.locator(".key[aria-pressed=false]").all_text_contents() == ["FedAvg"]
        assert page.locator(".plot path.mean").count() == 2


@drawn
def test_every_line_has_its_marker_and_its_name(toy: Path) -> None:
    code = """(n) => {
        const chart = document.querySelectorAll('.chart')[n];
        const shapes = [...chart.querySelectorAll('.keys li:not([hidden]) .mark')];
        const lines = chart.querySelectorAll('.plot path.mean').length;
        const names = new Set([...chart.querySelectorAll('.plot text.name')].map((t) => t.textContent)).size;
        return [lines, new Set(shapes.map((s) => s.getAttribute('d') + s.className.baseVal)).size, names];
    }"""
    with browser_page(toy.as_uri(), 1280) as page:
        for number in range(page.locator(".chart").count()):
            lines, shapes, names = page.evaluate(code, number)
            assert lines == shapes >= 1, number
            assert names == lines, number


@drawn
@pytest.mark.parametrize("name", ["toy", "compared"])
def test_a_phone_shows_it_without_scrolling_sideways(
    name: str, request: pytest.FixtureRequest
) -> None:
    page_file: Path = request.getfixturevalue(name)
    with browser_page(page_file.as_uri(), 390, has_touch=True) as page:
        page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        table = page.locator(".scroll").first
        wide = page.locator(".scroll.more-right").count()
        assert wide
        assert (
            page.get_by_text("Scroll sideways to see all columns").locator("visible=true").count()
            == wide
        )
        assert table.evaluate("(box) => getComputedStyle(box).overflowX") == "auto"


@drawn
def test_themes(compared: Path) -> None:
    color = "getComputedStyle(document.body).backgroundColor"
    with browser_page(compared.as_uri(), color_scheme="light") as page:
        light = page.evaluate(color)
        page.get_by_role("button", name="Dark theme").click()
        dark = page.evaluate(color)
        assert light != dark
        page.reload()
        assert page.evaluate(color) == dark
        page.get_by_role("button", name="Light theme").click()
        assert page.evaluate(color) == light
    with browser_page(compared.as_uri(), color_scheme="dark") as page:
        assert page.evaluate(color) == dark


@drawn
def test_downloads(compared: Path, tmp_path: Path) -> None:
    files = {}
    with browser_page(compared.as_uri()) as page:
        for kind in ("SVG", "PNG", "CSV", "JSON"):
            with page.expect_download() as waiting:
                page.get_by_role("button", name=f"Download {kind}").click()
            files[kind] = tmp_path / waiting.value.suggested_filename
            waiting.value.save_as(files[kind])
        page.goto(files["SVG"].as_uri())  # it is well-formed, and stands alone
        assert page.locator("text").count() > 10
        assert "var(" not in files["SVG"].read_text()
        strokes = page.evaluate(
            "[...document.querySelectorAll('svg > path')].map((n) => n.getAttribute('stroke'))"
        )
        assert (
            len(strokes) >= 7
        )  # the frame, and a line with a marker for each of three in the legend
        assert "#ffffff" not in strokes
        assert (
            files["SVG"].read_text().count(">SCAFFOLD<") == 2
        )  # beside the line, and in the legend
    assert files["PNG"].read_bytes()[:4] == b"\x89PNG"
    assert files["PNG"].stat().st_size > 10_000
    lines = list(csv.DictReader(files["CSV"].read_text().splitlines()))
    assert len(lines) == 3 * 7
    assert {line["name"] for line in lines} == {"SSF", "FedAvg", "SCAFFOLD"}
    assert (
        float(lines[-1]["relative error low"])
        <= float(lines[-1]["relative error mean"])
        <= float(lines[-1]["relative error high"])
    )
    assert [one["name"] for one in json.loads(files["JSON"].read_text())["series"]] == [
        "SSF",
        "FedAvg",
        "SCAFFOLD",
    ]


@drawn
def test_it_is_used_with_the_keyboard_and_read_aloud(compared: Path) -> None:
    with browser_page(compared.as_uri()) as page:
        page.locator("body").press("Tab")
        assert page.evaluate("document.activeElement.className") == "theme"
        named = "n.getAttribute('aria-label') || n.textContent.trim() || n.closest('label')?.textContent.trim()"
        code = f"[...document.querySelectorAll('input, button')].filter((n) => !({named})).length"
        unnamed = page.evaluate(code)
        assert unnamed == 0
        assert page.locator("thead th:not([scope=col])").count() == 0
        assert page.locator("tbody tr > :first-child:not(th[scope=row])").count() == 0
        page.locator(".plot svg").focus()
        page.keyboard.press("End")
        assert page.locator(".reading").is_visible()
