"""The toy study as one page."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from fedspan.study import page
from fedspan.study import paper_tables as tables
from fedspan.study.paper_results import CLOSE, Cell, Results, shown
from fedspan.study.paper_study import Part
from fedspan.study.tables import number

MARKS = {True: "yes", False: "no", None: ""}
READING = Markup(
    "Errors are ‖X − X*‖ / ‖X*‖, averaged over the last tenth of the evaluations; ± is the standard deviation over "
    "{} seed{}, each with its own data. The paper's numbers are last iterates of one run. "
    '<span class="yes">✓</span> within {} % of the paper, <span class="no">✗</span> not.'
)


def render(results: Results, figures: dict[str, Path], command: str) -> str:
    """The page as text; figures are put in as SVG."""
    study = results.study
    _, missed = tables.score(results)
    model_adapter = READING.format(study.seeds, "" if study.seeds == 1 else "s", round(CLOSE * 100))
    return page.render(
        f"The toy study of {study.settings['paper']}, regenerated",
        [tables.score_line(results), model_adapter],
        missed,
        [_part(results, part, figures.get(part.name)) for part in study.parts],
        command,
        f"{results.seconds() / 60:.0f} core-minutes of computing.",
    )


def _part(results: Results, part: Part, figure: Path | None) -> page.Section:
    header, plain = tables.wide(results, part)
    rows = [[page.Cell(text) for text in row] for row in plain]
    if part.kind in ("table", "tuned"):
        for row, cells in zip(rows, results.cells(part), strict=True):
            places = {cell.variant: cell for cell in cells}
            names = list(dict.fromkeys(c.variant for line in results.cells(part) for c in line))
            for place, name in enumerate(names, start=2):
                if name in places:
                    row[place] = _cell(places[name], part.kind == "tuned")
    grids = [page.Grid(header, rows)] if header else []
    return page.Section(part.table["title"], part.table["about"], grids, [] if figure is None else [figure])


def _cell(cell: Cell, tuned: bool) -> page.Cell:
    if tuned:
        return page.Cell(shown(cell.ours), f"η = {cell.lr:g}{cell.note}")
    if cell.paper is None:
        return page.Cell(shown(cell.ours))
    paper = "NaN" if cell.paper == "nan" else number(float(cell.paper))
    sign = tables.SIGNS[cell.verdict.holds]
    theirs = "" if cell.paper == "nan" and cell.verdict.text else f"paper {paper}"
    small = " ".join(part for part in (sign, theirs, cell.verdict.text) if part)
    return page.Cell(shown(cell.ours), small, MARKS[cell.verdict.holds])
