"""Measures what the convergence theory of arXiv:2604.25467 claims, and writes a table, figures and a page.

    python studies/theory/reproduce.py --scale smoke --out out/theory

Runs that are complete in OUT are kept.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

import drawings
from claims import JUDGES, Claim
from fedspan.core.errors import FedspanError
from fedspan.core.files import write_atomic
from fedspan.engine.run_dir import versions
from fedspan.study import page
from fedspan.study.execute import execute
from fedspan.study.jobs import seconds
from fedspan.study.report import Report, Section
from fedspan.study.tables import TextTable
from runs import Trial, load

HEADER = ["claim", "predicted", "observed", "holds"]


def reproduce(
    trial: Trial, out: Path, *, jobs: int, console: Console, command: str = ""
) -> list[Claim]:
    """Make the runs, judge the claims, and write table, figures and page."""
    runs = out / "runs"
    todo = [job for one in trial.experiments for job in one.jobs(runs, trial.seeds)]
    execute(todo, jobs, console)
    sections, claims, verdict = list[Section](), list[Claim](), list[str]()
    for one in trial.experiments:
        found = one.read(runs, trial.seeds)
        judged = JUDGES[one.name](found)
        claims += judged
        verdict.append(f"{one.title}: {said(judged)}")
        drawing = drawings.draw(one.name, found, out / "figures" / one.name)
        drawn = [] if drawing is None else [drawing]
        sections.append(Section(one.title, one.about, [_grid(judged)], drawings=drawn))
    about = f"{trial.about} {trial.seeds} seeds, scale `{trial.scale}`."
    head = "\n\n".join([f"# {trial.title}", *verdict, about])
    write_atomic(out / "tables.md", f"{head}\n\n{_grid(claims).markdown()}".encode())
    missed = [
        f"{one.text}: predicted {one.predicted}, observed {one.observed}"
        for one in claims
        if not one.holds
    ]
    made = ", ".join(f"{name} {number}" for name, number in versions().items())
    footer = f"{seconds(todo) / 60:.1f} core-minutes of computing. {made}"
    report = Report(trial.title, about, sections, command, missed, footer, verdict=verdict)
    write_atomic(out / "index.html", page.render(report).encode())
    shown = Table(*HEADER, title=trial.title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for one in claims:
        shown.add_row(*one.cells())
    console.print(shown)
    console.print(f"The page: {out / 'index.html'}", highlight=False)
    return claims


def said(claims: list[Claim]) -> str:
    """Which claims of an experiment hold, as a sentence."""
    missed = [one.text for one in claims if not one.holds]
    if missed:
        return f"{len(claims) - len(missed)} of {len(claims)} claims hold; not {'; '.join(missed)}."
    return "the claim holds." if len(claims) == 1 else f"all {len(claims)} claims hold."


def _grid(claims: list[Claim]) -> TextTable:
    return TextTable(HEADER, [[*one.cells()] for one in claims])


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--scale", default="paper", help="smoke or paper")
    parser.add_argument("--seeds", type=int, help="number of seeds; by default that of the scale")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--out", type=Path, required=True, help="directory for the results")
    args = parser.parse_args()
    command = shlex.join(["python", "studies/theory/reproduce.py", *sys.argv[1:]])
    try:
        reproduce(
            load(args.scale, args.seeds),
            args.out,
            jobs=args.jobs,
            console=Console(),
            command=command,
        )
    except FedspanError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
