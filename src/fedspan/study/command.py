"""`fedspan compare` and `fedspan reproduce`: run a study, save its results as data, and report from that data."""

from __future__ import annotations

import shlex
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from fedspan.core.errors import FedspanError, SpecError, at_least
from fedspan.core.extras import needs
from fedspan.core.files import lock_dir
from fedspan.core.terminal import say, table
from fedspan.costs.outline import keeps_objective, projected
from fedspan.data import datasets
from fedspan.engine.provenance import CHECKPOINT
from fedspan.study import parse, report, results, tables
from fedspan.study.execute import execute
from fedspan.study.fingerprint import changed, fingerprint
from fedspan.study.model import Part, Study
from fedspan.study.published import score_line
from fedspan.study.report import Report
from fedspan.study.results import RUNS, STUDY, Entry, Results
from fedspan.study.tuning import Runs
from fedspan.study.verdict import verdict_of

COMPARE = ("html", "md", "csv")


def run(
    study: Study, place: Path, *, jobs: int, console: Console, plugins: tuple[Path, ...] = ()
) -> None:
    """Make the runs of a study: tuning in stages, and all seeds of a variant as soon as its point is chosen."""
    runs = Runs(study, place)
    given = any(part.given is not None for part in study.parts)
    with lock_dir(place):
        _say_what_changed(study, place, console)
        for job in runs.tuning():
            job.forget_failure()  # of an earlier attempt: nothing is chosen before it is tried again
        runs = Runs(study, place)
        execute([], jobs, console, plugins, runs.possible() if given else None, runs.ready)
        for job in runs.tuning():
            (job.run_dir / CHECKPOINT).unlink(missing_ok=True)


def _say_what_changed(study: Study, place: Path, console: Console) -> None:
    """Name what differs from the earlier runs in a directory; runs with it are made again."""
    found: dict[str, str] = {}
    for part in study.parts:
        for row, variant in part.cells():
            found |= fingerprint(part.spec(variant, variant.points()[0], row, rounds=1))
    for what in changed(place, found):
        text = f"the {what} changed since the runs in {str(place)!r} were made: runs that depend on it are made again"
        say(text, console)


def make(
    study: Study,
    out: Path,
    *,
    jobs: int,
    formats: Sequence[str],
    line: str,
    console: Console,
    plugins: tuple[Path, ...] = (),
) -> Results:
    """Run a study in `out`, and write its data and report there. Complete runs are kept."""
    at_least("jobs", jobs, 1)
    report.check(formats)
    found = produce(study, out, jobs=jobs, line=line, console=console, plugins=plugins)
    files = Report.of_study(found).write(out, formats)
    for part in study.parts:
        show(part, found.entries[part.name], console)
    for entry in (one for entries in found.entries.values() for one in entries):
        for note in entry.notes:
            say(note, console)
    effort = f"{found.minutes:.1f} core-minutes. " if found.minutes >= 0.1 else ""
    effort += ", ".join(map(str, files))
    for text in filter(None, [score_line(found), effort, verdict_of(found)]):
        say(text, console)
    return found


def check(study: Study) -> None:
    """Refuse a study whose data sets, models or libraries are not here or damaged, before anything is written."""
    cells = [(part, row, variant) for part in study.parts for row, variant in part.cells()]
    specs = [part.spec(variant, variant.points()[0], row, rounds=1) for part, row, variant in cells]
    datasets.check(name for spec in specs for name in spec.task.requires())
    if any(spec.dp is not None for spec in specs):
        needs("privacy", "dp_accounting", "cryptography")


def _refuse_failure(study: Study, place: Path) -> None:
    """End a study of which every run failed."""
    failures = [job.failure() for job in Runs(study, place).jobs()]
    if failures and None not in failures:
        raise FedspanError(
            f"every run failed, the first one so: {failures[0]}; the runs are in {str(place)!r}"
        )


def produce(
    study: Study,
    out: Path,
    *,
    jobs: int,
    line: str,
    console: Console,
    plugins: tuple[Path, ...] = (),
) -> Results:
    """Run a study in `out` and write its results there as data. Complete runs are kept."""
    check(study)
    if len(study.parts) == 1:
        announce(study.parts[0], console)
        _warn_of_objectives(study.parts[0])
    with lock_dir(out):
        line = results.announce(study, out, line)
        run(study, out / RUNS, jobs=jobs, console=console, plugins=plugins)
        _refuse_failure(study, out / RUNS)
        results.save(results.collect(study, out / RUNS, line), out)
    return results.load(out)


def compare(study: Study, out: Path, *, resume: bool, console: Console, line: str, jobs: int = 1,
            formats: Sequence[str] = COMPARE, plugins: tuple[Path, ...] = ()) -> Results:  # fmt: skip
    """Run a comparison in `out`; one that is there already needs `resume`."""
    if (out / STUDY).exists() and not resume:
        raise SpecError(
            f"{str(out)!r} already holds a comparison; continue it with `resume=True`, or choose another `run_dir`"
        )
    return make(study, out, jobs=jobs, formats=formats, line=line, console=console, plugins=plugins)


def reproduce(name: str, out: Path, *, scale: str | None, seeds: int | None, jobs: int, again: bool,
              console: Console) -> Results:  # fmt: skip
    """Run a committed study in `out`; `again` deletes the earlier runs."""
    study = parse.committed(name, scale, seeds)
    if again:
        check(study)  # nothing is deleted if the study cannot run
        shutil.rmtree(out / RUNS, ignore_errors=True)
    asked = {"scale": scale, "seeds": seeds, "jobs": jobs, "out": out.name}
    options = [
        f"--{key} {shlex.quote(str(value))}" for key, value in asked.items() if value is not None
    ]
    line = " ".join(["fedspan reproduce", name, *options])
    return make(study, out, jobs=jobs, formats=report.FORMATS, line=line, console=console)


def announce(part: Part, console: Console) -> None:
    """Print what will be run."""
    rows = []
    for variant in part.variants:
        points = variant.points()
        lengths = sorted({part.spec(variant, point).rounds for point in points})
        rounds = "–".join(f"{t:,}" for t in dict.fromkeys((lengths[0], lengths[-1])))
        grid = "; ".join(
            f"{key.removeprefix('method.')} {', '.join(map(str, values))}"
            for key, values in variant.grid.items()
        )
        sizes = projected(part.spec(variant, points[0]))
        inside = "" if sizes is None else f"{sizes[0]:,} of {sizes[2]:,}"
        rows.append(
            [escape(text) for text in (variant.label, str(len(points)), rounds, grid, inside)]
        )
    heads = ("method", "points", "rounds", "grid", "parameters projected")
    console.print(table(heads, rows, width=console.width))


def _warn_of_objectives(part: Part) -> None:
    """Warn of methods that minimize another objective than the others."""
    specs = {variant.label: part.spec(variant, variant.points()[0]) for variant in part.variants}
    biased = [label for label, spec in specs.items() if not keeps_objective(spec)]
    if biased and len(biased) < len(specs):
        warnings.warn(
            f"{', '.join(biased)}: another objective than the other methods minimize, because clients have different "
            "weights and not all take part in a round; set `participation.unbiased` to true or `participation.weights` "
            "to 'uniform'",
            stacklevel=5,
        )


def show(part: Part, entries: Sequence[Entry], console: Console) -> None:
    """Print the main table of a part; the terminal has room for one line per variant and few columns."""
    grid = tables.results(part, entries)
    lines = [
        grid.header,
        *([cell if isinstance(cell, str) else cell.main for cell in row] for row in grid.rows),
    ]
    if len(part.rows) > 1:
        first = len(lines[0]) - len({entry.variant for entry in entries})
        lines = [[" ".join(line[:first]), *line[first:]] for line in lines]
        lines = [list(column) for column in zip(*lines, strict=True)]
    elif part.budget is None:
        lines = [[line[n] for n in (0, 1, 2, 4, 6)] for line in lines]
    lines = [[escape(cell) for cell in line] for line in lines]
    console.print(table(lines[0], lines[1:], width=console.width, title=part.title or None))
