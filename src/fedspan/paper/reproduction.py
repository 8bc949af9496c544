"""`fedspan reproduce`: run what a study needs, in several processes, then write its tables, figures and page."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import shutil
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from fedspan import experiment
from fedspan.core.checkpoint import write_atomic
from fedspan.core.errors import FedspanError, at_least
from fedspan.paper.results import Results
from fedspan.paper.study import Case, Study
from fedspan.runtimes import history
from fedspan.runtimes.folder import CHECKPOINT


def reproduce(study: Study, out: Path, *, jobs: int, again: bool, console: Console) -> None:
    """Regenerate a study in `out`. Runs that are complete there are kept, unfinished ones resumed."""
    at_least("jobs", jobs, 1)
    try:
        from fedspan.paper import figures, page, tables
    except ImportError as error:
        raise FedspanError(f"{error.name} is not installed; pip install 'fedspan[plot]'") from None
    runs = out / ("runs-quick" if study.quick else "runs")
    if again:
        shutil.rmtree(runs, ignore_errors=True)
    began = time.monotonic()
    results = Results(study, runs)
    _carry_out(study, study.searches(), runs, jobs, console, "learning-rate search")
    _carry_out(study, study.cases(results.steps()), runs, jobs, console, "runs")
    minutes = (time.monotonic() - began) / 60

    drawn = {part.name: path for part in study.parts if (path := figures.draw(results, part, _made(out / "figures")))}
    _made(out / "tables")
    for part in study.parts:
        write_atomic(out / "tables" / f"{part.name}.csv", tables.long(results, part).encode())
    text = "\n".join(tables.markdown(results, part) for part in study.parts)
    write_atomic(out / "tables.md", text.encode())
    short = " --quick" if study.quick else ""
    command = f"fedspan reproduce {study.name}{short} --seeds {study.seeds} --jobs {jobs} --out {shlex.quote(out.name)}"
    write_atomic(out / "index.html", page.render(results, drawn, command).encode())
    _show(results, console)
    console.print(f"{minutes:.1f} minutes. The page: {out / 'index.html'}", highlight=False)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _carry_out(study: Study, cases: list[Case], runs: Path, jobs: int, console: Console, what: str) -> None:
    todo = [case for case in cases if not _complete(study, case, runs)]
    total = sum(case.rounds for case in todo)
    columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %")]
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task(what, total=total or 1, completed=0 if total else 1)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(jobs, context, _one_thread) as pool:
            waiting = {pool.submit(_run, study.spec(case), runs / case.key, study.seeds): case for case in todo}
            try:
                for future in as_completed(waiting):
                    if not future.result():
                        raise KeyboardInterrupt
                    progress.advance(bar, waiting[future].rounds)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                console.print("stopped; the same command goes on from here")
                raise


def _complete(study: Study, case: Case, runs: Path) -> bool:
    """Whether a run is there for all seeds and has gone far enough, or diverged."""
    folder = runs / case.key
    folders = [folder] if study.seeds == 1 else [folder / f"seed-{seed}" for seed in range(study.seeds)]
    paths = [one / history.NAME for one in folders]
    ends = [history.read(path)[1][-1:] for path in paths if path.exists()]
    enough = [bool(end) and (end[0]["round"] >= case.rounds or bool(end[0].get("diverged"))) for end in ends]
    return len(enough) == study.seeds and all(enough)


def _one_thread() -> None:
    import torch

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


def _run(spec: experiment.Spec, folder: Path, seeds: int) -> bool:
    resume = (folder / CHECKPOINT).exists()
    if not resume:
        shutil.rmtree(folder, ignore_errors=True)
    return experiment.run(spec, folder, seeds=seeds, resume=resume).finished


def _show(results: Results, console: Console) -> None:
    """The main table in the terminal, a line a method so that it fits 80 columns."""
    from fedspan.paper import tables

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
