"""One self-contained HTML page that shows a whole study."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from fedspan.paper import tables
from fedspan.paper.results import CLOSE, Cell, Results, number
from fedspan.paper.study import Part
from fedspan.runtimes.folder import versions

TEMPLATE = Path(__file__).with_name("page.html")
MARKS = {True: "yes", False: "no", None: ""}


def render(results: Results, figures: dict[str, Path], command: str) -> str:
    """The page as text; figures are put in as SVG."""
    study = results.study
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    _, missed = tables.score(results)
    return environment.from_string(TEMPLATE.read_text()).render(
        title=f"The toy study of {study.settings['paper']}, regenerated",
        summary=tables.score_line(results),
        missed=missed,
        seeds=study.seeds,
        close=round(CLOSE * 100),
        parts=[_part(results, part, figures.get(part.name)) for part in study.parts],
        command=command,
        footer=f"{results.seconds() / 60:.0f} core-minutes of computing. "
        + ", ".join(f"{k} {v}" for k, v in versions().items()),
    )


def _part(results: Results, part: Part, figure: Path | None) -> dict[str, Any]:
    header, plain = tables.wide(results, part)
    rows = [[{"main": text, "small": "", "mark": ""} for text in row] for row in plain]
    if part.kind in ("table", "tuned"):
        for row, cells in zip(rows, results.cells(part), strict=True):
            places = {cell.variant: cell for cell in cells}
            names = list(dict.fromkeys(c.variant for line in results.cells(part) for c in line))
            for place, name in enumerate(names, start=2):
                if name in places:
                    row[place] = _cell(places[name], part.kind == "tuned")
    svg = "" if figure is None else figure.read_text().partition("<svg")[2]
    return {
        "title": part.table["title"],
        "about": _coded(part.table["about"]),
        "header": header,
        "rows": rows,
        "svg": f"<svg{svg}" if svg else "",
    }


def _coded(text: str) -> Markup:
    """`words` as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))  # noqa: S704 (escaped just here)


def _cell(cell: Cell, tuned: bool) -> dict[str, str]:
    if tuned:
        return {"main": str(cell.ours), "small": f"η = {cell.lr:g}{cell.note}", "mark": ""}
    if cell.paper is None:
        return {"main": str(cell.ours), "small": "", "mark": ""}
    paper = "NaN" if cell.paper == "nan" else number(float(cell.paper))
    sign = tables.SIGNS[cell.verdict.holds]
    shown = "" if cell.paper == "nan" and cell.verdict.text else f"paper {paper}"
    small = " ".join(part for part in (sign, shown, cell.verdict.text) if part)
    return {"main": str(cell.ours), "small": small, "mark": MARKS[cell.verdict.holds]}
