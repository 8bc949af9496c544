"""The one way to make a study: check it, make its runs, save its results as data, and report from that data."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from fedspan.core.errors import FedspanError, SpecError
from fedspan.core.extras import needs
from fedspan.core.files import lock_dir
from fedspan.core.spec import Spec
from fedspan.core.terminal import say, table
from fedspan.costs.plan import keeps_objective
from fedspan.data import datasets
from fedspan.engine.provenance import CHECKPOINT
from fedspan.study import report, results
from fedspan.study.execute import execute
from fedspan.study.model import Study, committed, plugins
from fedspan.study.results import RUNS, STUDY, Results
from fedspan.study.tuning import Runs


def conduct(
    study: Study,
    out: Path,
    *,
    console: Console,
    jobs: int = 1,
    resume: bool = True,
    line: str = "",
    formats: Sequence[str] = (),
    plugins: tuple[Path, ...] = (),
) -> Results:
    """Make a study in `out`: its runs, its results as data, and a report in some formats. Complete runs are kept.

    Args:
        study: The study.
        out: Its directory. One that holds a study already needs `resume`.
        console: Where progress and results are shown.
        jobs: Number of processes.
        resume: Continue the study in `out`.
        line: The command or call that asks for it.
        formats: Files to write besides the data, of `report.FORMATS`; with any, tables and verdict are printed.
        plugins: Files of the user's own.
    """
    report.check(formats)
    if (out / STUDY).exists() and not resume:
        raise SpecError(
            f"{str(out)!r} already holds a comparison; continue it with `resume=True`, or choose another `run_dir`"
        )
    check(study)
    if len(study.parts) == 1:
        (part,) = study.parts
        specs = {v.label: part.spec(v, v.points()[0]) for v in part.variants}
        biased = [label for label, spec in specs.items() if not keeps_objective(spec)]
        if biased and len(biased) < len(specs):
            warnings.warn(
                f"{', '.join(biased)}: another objective than the other methods minimize, because clients have "
                "different weights and not all take part in a round; set `participation.unbiased` to true or "
                "`participation.weights` to 'uniform'",
                stacklevel=4,
            )
    with lock_dir(out):
        line = results.announce(study, out, line)
        make_runs(study, out / RUNS, jobs=jobs, console=console, plugins=plugins)
        failures = [job.failure() for job in Runs(study, out / RUNS).jobs()]
        if failures and None not in failures:
            raise FedspanError(
                f"every run failed, the first one so: {failures[0]}; the runs are in {str(out / RUNS)!r}"
            )
        results.save(results.collect(study, out / RUNS, line), out)
    found = results.load(out)
    if formats:
        made = report.of_study(found)
        show(made, found.minutes, made.write(out, formats), console)
    return found


def make_runs(
    study: Study, place: Path, *, jobs: int, console: Console, plugins: tuple[Path, ...] = ()
) -> Runs:
    """Make the runs of a study: tuning in stages, and all seeds of a variant as soon as its point is chosen."""
    for job in Runs(study, place).tuning():
        job.forget_failure()  # of an earlier attempt: nothing is chosen before it is tried again
    runs = Runs(study, place)
    objects = jobs > 1 and any(part.objects for part in study.parts)
    execute([], jobs, console, plugins, runs.possible() if objects else (), runs.ready)
    for job in runs.tuning():
        (job.run_dir / CHECKPOINT).unlink(missing_ok=True)
    return runs


def firsts(study: Study) -> list[Spec]:
    """One spec of each variant in each case."""
    cells = [(part, row, variant) for part in study.parts for row, variant in part.cells()]
    return [part.spec(variant, variant.points()[0], row, rounds=1) for part, row, variant in cells]


def check(study: Study) -> None:
    """Refuse a study whose data sets, models or libraries are not here or damaged, before anything is written."""
    specs = firsts(study)
    datasets.check(name for spec in specs for name in spec.task.requires())
    if any(spec.dp is not None for spec in specs):
        needs("privacy", "dp_accounting", "cryptography")


def reproduce(
    name: str,
    out: Path,
    *,
    scale: str | None,
    seeds: int | None,
    jobs: int,
    again: bool,
    console: Console,
    line: str = "",
) -> Results:
    """Make a study that comes with fedspan in `out`; `again` deletes the earlier runs."""
    study = committed(name, scale, seeds)
    if again:
        check(study)  # nothing is deleted if the study cannot run
        shutil.rmtree(out / RUNS, ignore_errors=True)
    own = plugins(name)
    return conduct(
        study, out, jobs=jobs, formats=report.FORMATS, line=line, console=console, plugins=own
    )


def show(made: report.Report, minutes: float, files: Sequence[Path], console: Console) -> None:
    """Print the main table of every comparison and the verdict; a terminal has room for few columns."""
    for one in made.sections:
        main = one.tables[0]
        if one.part is not None and len(one.part.rows) == 1:
            lines = [[escape(cell) for cell in line[:3]] for line in (main.header, *main.texts())]
            title = one.part.title or None
            console.print(table(lines[0], lines[1:], width=console.width, title=title))
    notes = [note for one in made.sections for entry in one.entries for note in entry.notes]
    effort = f"{minutes:.1f} core-minutes. " if minutes >= 0.1 else ""
    for text in (*notes, effort + ", ".join(map(str, files)), *made.told):
        if text:
            say(text, console)
