"""`fedspan reproduce`: run what a study needs, in several processes, then write its tables, figures and page."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fedspan.core.checkpoint import write_atomic
from fedspan.study.paper_results import Results
from fedspan.study.paper_study import Study, command, made, prepared
from fedspan.study.pool import execute


def reproduce(study: Study, out: Path, *, jobs: int, again: bool, console: Console) -> None:
    """Regenerate a study in `out`. Runs that are complete there are kept, unfinished ones resumed."""
    runs = prepared(out / ("runs-quick" if study.quick else "runs"), jobs, again)
    from fedspan.study import paper_figures as figures
    from fedspan.study import paper_page as page
    from fedspan.study import paper_tables as tables

    began = time.monotonic()
    results = Results(study, runs)
    execute([study.job(case, runs) for case in study.searches()], jobs, console, "learning-rate search")
    execute([study.job(case, runs) for case in study.cases(results.steps())], jobs, console, "runs")
    minutes = (time.monotonic() - began) / 60

    drawn = {part.name: path for part in study.parts if (path := figures.draw(results, part, made(out / "figures")))}
    made(out / "tables")
    for part in study.parts:
        write_atomic(out / "tables" / f"{part.name}.csv", tables.long(results, part).encode())
    text = "\n".join(tables.markdown(results, part) for part in study.parts)
    write_atomic(out / "tables.md", text.encode())
    line = command(study.name, out, jobs=jobs, seeds=study.seeds, scale="smoke" if study.quick else "paper")
    write_atomic(out / "index.html", page.render(results, drawn, line).encode())
    _show(results, console)
    console.print(f"{minutes:.1f} minutes. The page: {out / 'index.html'}", highlight=False)


def _show(results: Results, console: Console) -> None:
    """The main table in the terminal, a line a method so that it fits 80 columns."""
    from fedspan.study import paper_tables as tables

    study, part = results.study, results.study.part("table")
    length = f"{study.rounds(part):,} rounds, {study.seeds} seed{'s' if study.seeds > 1 else ''}"
    note = ", at 25,000 rounds" if study.quick else ""
    title = f"{part.table['title']}: tail error after {length} (in brackets the paper's{note})"
    cells = results.cells(part)
    heads = [f"het {line[0].row['het']:g}" for line in cells]
    table = Table("method", title=title, title_justify="left", header_style="bold", box=None, padding=(0, 1, 0, 0))
    for head in heads:
        table.add_column(head, no_wrap=True)
    for column in zip(*cells, strict=True):
        table.add_row(study.label(column[0].variant), *(tables.brief(cell) for cell in column))
    console.print(table)
    console.print(tables.score_line(results), highlight=False)
