"""`fedspan report`: a page, Markdown and CSV from any folders that hold runs; and the same for a comparison.

A folder that `fedspan compare` wrote is shown as it showed it, at each method's best point; in any other folder every
spec is a line, seeds taken together, and tasks are kept apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedspan.api import spec as experiment
from fedspan.api.spec import Spec
from fedspan.core.checkpoint import write_atomic
from fedspan.core.errors import CheckpointError, FedspanError, SpecError, one_of
from fedspan.core.extras import needs
from fedspan.engine.run_dir import toml
from fedspan.study import tables
from fedspan.study.chart import best_first, by_memory, chart
from fedspan.study.memory import WORDS, client_memory
from fedspan.study.outcome import Outcome
from fedspan.study.plan import COLORS, Comparison, goal_of, main_metric
from fedspan.study.series import Series, find

FORMATS = ("html", "md", "csv")
PLAN = "comparison.toml"
RUNS = "runs"
FEW = 5  # methods that a title names
Named = tuple[str, tables.Cells]  # title of a table, and the table


@dataclass(frozen=True)
class Chapter:
    """Series that may be compared, with their tables: a section of a page, a part of the Markdown, lines of the CSV."""

    title: str
    about: str
    series: list[Series]
    records: list[dict[str, Any]]
    grids: list[Named]  # the first stands open, the others are folded away
    notes: list[str]
    chart: dict[str, Any]
    memory: dict[str, Any] | None = None  # the same against client memory, where that is known

    @staticmethod
    def of_runs(title: str, series: list[Series], metric: str | None) -> Chapter:
        """Of runs that were found somewhere."""
        known = [name for name in series[0].metrics if all(name in one.metrics for one in series)]
        if metric is not None:
            one_of("metric", metric, known)
        metric = metric or main_metric(known)
        goal = goal_of(metric)
        for rank, place in enumerate(best_first(series, metric, goal)):  # the best look least alike
            series[place] = dataclasses.replace(series[place], color=COLORS[rank % len(COLORS)])
        held = [client_memory(one.table) for one in series]
        found = tables.records(series, metric, goal, [client_state(one.table) for one in series], held)
        notes = [
            f"{one.label}: seed {seed} is at round {t} of {one.table['rounds']}"
            for one in series
            for seed, t in one.unfinished().items()
        ]
        drawn, marked = chart(series, metric, goal), by_memory(series, held, metric, goal)
        return Chapter(title, "", series, found, [("Results", tables.summary(found, metric))], notes, drawn, marked)

    @staticmethod
    def of_outcome(title: str, about: str, outcome: Outcome, main: tables.Cells | None = None) -> Chapter:
        """Of a comparison; `main` replaces its table of results."""
        plan = outcome.comparison
        series = [outcome.series(variant) for variant in plan.variants]
        held = [client_memory(one.table) for one in series]
        found = tables.records(series, plan.metric, plan.goal, [client_state(one.table) for one in series], held)
        for record, variant in zip(found, plan.variants, strict=True):
            record |= {"tuned": tables.point_of(outcome, variant), "result": outcome.final(variant)}
        results = tables.with_memory(main or tables.main(outcome), held)
        shown = [("Results", results), ("Runs", tables.summary(found, plan.metric))]
        if any(outcome.trials(variant) for variant in plan.variants):
            shown.append(("Tuning", tables.tuning(outcome)))
        drawn = chart(series, plan.metric, plan.goal, plan.budget)
        marked = by_memory(series, held, plan.metric, plan.goal, plan.budget, plan.tail)
        notes = [f"failed: {line}" for line in outcome.failures()]
        return Chapter(title, about, series, found, shown, notes, drawn, marked)

    def section(self) -> Any:
        """As a section of the page."""
        from fedspan.study.page import Grid, Section

        grids = [Grid(*cells, title="" if n == 0 else name) for n, (name, cells) in enumerate(self.grids)]
        specs = [(one.label, toml({k: v for k, v in one.table.items() if k != "seed"})) for one in self.series]
        return Section(self.title, self.about, grids, [], self.notes, self.chart, specs, self.memory)

    def markdown(self) -> str:
        """As Markdown."""
        parts = [f"## {self.title}\n", f"{self.about}\n" if self.about else ""]
        parts += [
            f"{f'### {name}' if n else ''}\n\n{tables.markdown(t)}".lstrip() for n, (name, t) in enumerate(self.grids)
        ]
        parts += ["".join(f"- {note}\n" for note in self.notes), f"{WORDS}\n" if self.memory else ""]
        return "\n".join(part for part in parts if part)


def client_state(table: dict[str, Any]) -> int | None:
    """Bytes that a client keeps between rounds beside its copy of the model; None where the spec alone does not say."""
    if "task" not in table:
        return None
    try:
        return experiment.price(dataclasses.replace(Spec.from_table(table), rounds=1)).client_state
    except (FedspanError, OSError, ImportError):  # a method of the user's, or data that is not here
        return None


def write(
    out: Path, title: str, lead: str, chapters: Sequence[Chapter], formats: Sequence[str], command: str
) -> list[Path]:
    """Write chapters in the formats asked for; the files."""
    out.mkdir(parents=True, exist_ok=True)
    texts: dict[str, str] = {}
    if "html" in formats:
        from fedspan.study import page

        texts["index.html"] = page.render(title, [lead], [], [one.section() for one in chapters], command, "")
    if "md" in formats:
        texts["results.md"] = "\n".join(
            [f"# {title}\n", *([f"{lead}\n"] if lead else []), *(c.markdown() for c in chapters)]
        )
    if "csv" in formats:
        several = len(chapters) > 1
        found = [({"part": one.title} if several else {}) | record for one in chapters for record in one.records]
        texts["results.csv"] = tables.results_csv(found)
        parts = [one.title for one in chapters for _ in one.series] if several else None
        texts["curves.csv"] = tables.curves_csv([series for one in chapters for series in one.series], parts)
    for name, text in texts.items():
        write_atomic(out / name, text.encode())
    return [out / name for name in texts]


def check(formats: Sequence[str]) -> None:
    """Refuse a format that is unknown, or whose library is missing, before anything is done."""
    for name in formats:
        one_of("format", name, FORMATS)
    if "html" in formats:
        needs("plot", "jinja2")


def report(folders: Sequence[Path], out: Path, formats: Sequence[str], metric: str | None, command: str) -> list[Path]:
    """Show what the folders hold; the files that were written."""
    check(formats)
    chapters, others = [], []
    for folder in folders:
        if not folder.exists():
            raise SpecError(f"{str(folder)!r} does not exist; give folders that runs were written to")
        found = _comparison(folder) if (folder / PLAN).is_file() else None
        chapters += [] if found is None else [found]
        others += [folder] if found is None else []
    if others:
        chapters += [Chapter.of_runs(title, series, metric) for title, series in find(others)]
    count = sum(len(one.seeds) for chapter in chapters for one in chapter.series)
    lead = f"{count} run{'s' if count > 1 else ''} from {', '.join(folder.name for folder in folders)}."
    return write(out, "Runs side by side", lead, chapters, formats, command)


def _comparison(folder: Path) -> Chapter | None:
    """A folder as `compare` shows it; None while its runs are not all there."""
    plan = Comparison.from_table(experiment.read_toml(folder / PLAN))
    try:
        return Chapter.of_outcome(titled(plan), described(plan), Outcome(plan, folder / RUNS))
    except CheckpointError:
        return None


def titled(plan: Comparison) -> str:
    """What is compared on what; many methods are counted, and the task is told by what is set of it."""
    names, task = [variant.label for variant in plan.variants], plan.base["task"]
    if len(names) > FEW:
        return ", ".join(
            [f"{len(names)} methods on {task['name']}", *(f"{k} = {v}" for k, v in task.items() if k != "name")]
        )
    listed = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
    return f"{listed} on {task['name']}"


def described(plan: Comparison) -> str:
    """How a comparison was made, in words."""
    tuned = any(len(variant.points()) > 1 for variant in plan.variants)
    seeds = f"{plan.seeds} seed{'s' if plan.seeds > 1 else ''}, the same for all"
    first = f"first {plan.tune_seeds} seeds" if plan.tune_seeds > 1 else "first seed"
    parts = [
        f"Every method runs under {seeds}; ± is the standard deviation over them." if plan.seeds > 1 else "One seed."
    ]
    if tuned:
        parts.append(f"Each is tuned over its own grid on the {first}; * marks a value at the edge of its grid.")
    if plan.budget is not None:
        parts.append(f"Results are read off where {plan.budget.words()} are spent, at the last evaluation within.")
        if tuned:
            parts.append(f"Columns at another cost show the best point of the same grid there, on the {first}.")
    if plan.tail > 1:
        parts.append(f"A result is the mean of the last {plan.tail} evaluations.")
    return " ".join(parts)
