"""`fedspan compare`: tune, run and show a comparison in a folder, with the runs that are there kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fedspan.core.checkpoint import write_atomic
from fedspan.core.errors import SpecError, at_least
from fedspan.engine.lock import lock_dir
from fedspan.engine.run_dir import toml
from fedspan.study import report, tables
from fedspan.study.outcome import Outcome
from fedspan.study.plan import Comparison
from fedspan.study.pool import execute, seconds


def run(
    plans: Sequence[Comparison], runs: Path, *, jobs: int, console: Console, plugins: tuple[Path, ...] = ()
) -> list[Outcome]:
    """Carry out comparisons that share their runs: first all tuning, then all seeds at the chosen points."""
    with lock_dir(runs):
        execute([job for plan in plans for job in plan.tuning(runs)], jobs, console, "tuning", plugins)
        chosen = [Outcome(plan, runs).chosen() for plan in plans]
        final = [job for plan, points in zip(plans, chosen, strict=True) for job in plan.final(runs, points)]
        execute(final, jobs, console, "runs", plugins)
    return [Outcome(plan, runs) for plan in plans]


def minutes(outcomes: Sequence[Outcome]) -> float:
    """Computing time of all runs that the outcomes rest on."""
    return seconds(job for outcome in outcomes for job in outcome.jobs()) / 60


def compare(
    plan: Comparison,
    out: Path,
    *,
    jobs: int,
    resume: bool,
    formats: Sequence[str],
    line: str,
    console: Console,
    plugins: tuple[Path, ...] = (),
) -> Outcome:
    """Carry out a comparison in `out` and write its page, tables and plan there."""
    at_least("jobs", jobs, 1)
    report.check(formats)
    if (out / report.PLAN).exists() and not resume:
        raise SpecError(
            f"{str(out)!r} already holds a comparison; add --resume to go on with it, or choose another --out"
        )
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / report.PLAN, f"{toml(plan.to_table())}\n".encode())
    show_plan(plan, console)
    (outcome,) = run([plan], out / report.RUNS, jobs=jobs, console=console, plugins=plugins)
    chapter = report.Chapter.of_outcome("Results", report.described(plan), outcome)
    files = report.write(out, report.titled(plan), "", [chapter], formats, line)
    show(outcome, console)
    console.print(
        f"{minutes([outcome]):.1f} core-minutes. {', '.join(map(str, files))}", highlight=False, soft_wrap=True
    )
    return outcome


def show_plan(plan: Comparison, console: Console) -> None:
    """What will be run, before it is."""
    table = Table(box=None, header_style="dim", padding=(0, 1, 0, 0))
    for head in ("method", "points", "rounds", "grid"):
        table.add_column(head, justify="right" if head in ("points", "rounds") else "left")
    for variant in plan.variants:
        points = variant.points()
        lengths = sorted({plan.spec(variant, point).rounds for point in points})
        rounds = "–".join(f"{t:,}" for t in dict.fromkeys((lengths[0], lengths[-1])))
        grid = "; ".join(f"{key} {values}" for key, values in variant.grid.items())
        table.add_row(variant.label, str(len(points)), rounds, grid)
    console.print(table)


def show(outcome: Outcome, console: Console, title: str | None = None) -> None:
    """The table of results in the terminal, where fewer columns have room."""
    header, rows = tables.main(outcome)
    keep = (0, 1, 2, 4, 6) if outcome.comparison.budget is None else range(len(header))
    table = Table(*(header[n] for n in keep), title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for row in rows:
        table.add_row(*(row[n] for n in keep))
    console.print(table)
