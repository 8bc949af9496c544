"""The self-contained HTML page of a report: text, charts, tables, and the command that made it.

web/page.html is the template, into which page.css and the scripts are put; nothing is loaded from elsewhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import tomli_w
from markupsafe import Markup, escape

from fedspan.study.chart import by_memory, chart
from fedspan.study.report import Report, Section
from fedspan.study.tables import Cell, Grid

WEB = Path(__file__).parent / "web"
SCRIPTS = (
    "dom",
    "drawing",
    "reading",
    "download",
    "chart",
    "tables",
    "page",
)  # in the order of their definitions


def render(report: Report, live: str = "") -> str:
    """A report as a page; `live` is the stamp of a page that follows a run."""
    return template(
        report.title,
        report.lead,
        [_section(one) for one in report.sections],
        report.command,
        report.footer,
        report.missed,
        verdict=report.verdict,
        live=live,
    )


def template(
    title: str,
    lead: Sequence[str],
    sections: Sequence[Mapping[str, Any]],
    command: str,
    footer: str,
    missed: Sequence[str] = (),
    *,
    verdict: Sequence[str] = (),
    live: str = "",
) -> str:
    """A page of sections, each with a title, about, notes, charts, grids, drawings (SVG files) and specs."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string((WEB / "page.html").read_text("utf-8")).render(
        title=title,
        verdict=[coded(text) for text in verdict],
        lead=[coded(text) for text in lead],
        missed=missed,
        sections=[_complete(one) for one in sections],
        command=command,
        footer=footer,
        live=live,
        style=_own("page.css"),
        script=Markup("\n").join(_own(f"{name}.js") for name in SCRIPTS),
    )


def main_of(page: str) -> str:
    """What stands between <main> and </main>."""
    return page.partition("<main>")[2].rpartition("</main>")[0]


def coded(text: str) -> Markup:
    """Text in which words between backticks are code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))  # noqa: S704 (escaped just here)


def _own(name: str) -> Markup:
    return Markup((WEB / name).read_text("utf-8"))  # noqa: S704 (our own file)


def _section(section: Section) -> dict[str, Any]:
    charts = [("", section.title, chart(section.part, section.entries))]
    memory = by_memory(section.part, section.entries)
    charts += [] if memory is None else [(" marks", f"{section.title}, by client memory", memory)]
    first = [entry for entry in section.entries if entry.row == 0]
    specs = [
        (e.series.label, tomli_w.dumps({k: v for k, v in e.series.spec.items() if k != "seed"}))
        for e in first
    ]
    words = {
        "title": section.title,
        "about": section.about,
        "verdict": section.verdict,
        "notes": section.notes,
    }
    return words | {"grids": section.grids, "charts": charts, "specs": specs}


def _complete(section: Mapping[str, Any]) -> dict[str, Any]:
    """A section with everything that the template reads."""
    usual: dict[str, Any] = {
        "verdict": [],
        "notes": [],
        "charts": [],
        "grids": [],
        "drawings": [],
        "specs": [],
    }
    found = usual | dict(section)
    found["about"] = coded(found["about"])
    found |= {key: [coded(text) for text in found[key]] for key in ("verdict", "notes")}
    found["charts"] = [(kind, name, _data(drawn)) for kind, name, drawn in found["charts"]]
    found["drawings"] = [_drawing(path) for path in found["drawings"]]
    found["grids"] = [_grid(grid) for grid in found["grids"]]
    return found


def _drawing(path: Path) -> Markup:
    """A figure of matplotlib in the page's own ink and on its own paper, which a theme may change."""
    text = (
        path.read_text("utf-8")
        .replace("#000000", "currentColor")
        .replace("fill: #ffffff", "fill: none")
    )
    return Markup(f"<svg{text.partition('<svg')[2]}")  # noqa: S704 (our own file)


def _grid(grid: Grid) -> Grid:
    rows: list[list[Cell | str]] = [
        [Cell(c) if isinstance(c, str) else c for c in row] for row in grid.rows
    ]
    return Grid(grid.header, rows, grid.title)


def _data(value: dict[str, Any]) -> Markup:
    """JSON in which no text can end the script element."""
    return Markup(  # noqa: S704
        json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    )
