"""`fedspan report`: page, Markdown, CSV and figures of studies saved as data, and of any directories with runs.

Every section is made of a part and its entries. Runs that belong to no study are shown as one part per task, in which
every spec is a variant.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedspan.core.errors import SpecError, one_of, path_of
from fedspan.core.extras import needs
from fedspan.core.files import make_dir, write_atomic
from fedspan.core.versions import versions
from fedspan.costs.outline import client_memory
from fedspan.engine.history import higher_is_better, main_metric
from fedspan.study import results as data
from fedspan.study import tables
from fedspan.study.chart import best_first
from fedspan.study.model import COLORS, Part, Variant, goal_of
from fedspan.study.published import orders, score, score_line
from fedspan.study.results import Entry, Results
from fedspan.study.series import Series, find
from fedspan.study.tables import Grid
from fedspan.study.titles import described, listed, problem, standing, titled
from fedspan.study.verdict import said

FORMATS = ("html", "md", "csv", "png")


@dataclass(frozen=True)
class Section:
    """A part with its tables: a section of the page and of the Markdown, rows of the CSV."""

    title: str
    about: str
    part: Part
    entries: list[Entry]
    grids: list[Grid]  # the first stands open on the page, the others are folded away
    notes: list[str]
    verdict: list[str] = field(default_factory=list)  # what the results say, in sentences

    @staticmethod
    def of_part(part: Part, entries: list[Entry]) -> Section:
        """A part of a study."""
        grids = [tables.results(part, entries), tables.runs(part, entries)]
        if any(entry.tried for entry in entries):
            grids.append(tables.tuning(part, entries))
        failed = [f"failed: {line}" for entry in entries for line in entry.failures]
        events = [note for entry in entries for note in entry.notes]
        notes = [*orders(part, entries), *dict.fromkeys(failed), *events]
        title, about = part.title or "Results", part.about or described(part)
        return Section(title, about, part, entries, grids, notes, said(part, entries))

    @staticmethod
    def of_runs(title: str, series: list[Series], metric: str | None) -> Section:
        """Runs on one task that were found somewhere."""
        known = [name for name in series[0].metrics if all(name in one.metrics for one in series)]
        if metric is not None:
            one_of("metric", metric, known)
        if not known:
            raise SpecError("the runs report no metric to compare by; give them a test set")
        given = series[0].spec.get("metrics", ())
        sure = [name for name in known if higher_is_better(name, given) is not None]
        metric = metric or main_metric(sure or known, given)
        goal = goal_of(metric, given, option="")
        for rank, place in enumerate(
            best_first(series, metric, goal)
        ):  # the best ones get the most distinct colors
            series[place] = dataclasses.replace(series[place], color=COLORS[rank % len(COLORS)])
        variants = [Variant(one.label, one.label, one.color, {}, {}) for one in series]
        part = Part(name="runs", base=series[0].spec, variants=variants, metric=metric, goal=goal)
        entries = [_found(one, part) for one in series]
        notes = [
            f"{one.label}: seed {seed} is at round {t} of {one.spec['rounds']}"
            for one in series
            for seed, t in one.unfinished.items()
        ]
        grid = dataclasses.replace(tables.runs(part, entries), title="")
        return Section(title, "", part, entries, [grid], notes)

    def markdown(self) -> str:
        """The section as Markdown."""
        parts = [
            f"## {self.title}\n",
            *(f"{text}\n" for text in (self.about, " ".join(self.verdict)) if text),
        ]
        parts += [
            f"{f'### {grid.title}' if grid.title else ''}\n\n{grid.markdown()}".lstrip()
            for grid in self.grids
        ]
        memory = any(entry.client_memory is not None for entry in self.entries)
        parts += [
            "".join(f"- {note}\n" for note in self.notes),
            f"{tables.MEMORY_NOTE}\n" if memory else "",
        ]
        return "\n".join(part for part in parts if part)


def _found(one: Series, part: Part) -> Entry:
    curve = one.curve(part.metric)
    found = Entry(0, one.label, one.thin(), curve.tail(1), curve.best(part.goal))
    state, memory = data.client_state(one.spec), client_memory(one.spec)
    return dataclasses.replace(
        found, client_state=state, client_memory=memory, **data.known_of(one.spec)
    )


@dataclass(frozen=True)
class Report:
    """Sections under one title."""

    title: str
    lead: list[str]
    sections: list[Section]
    command: str
    missed: list[str] = field(default_factory=list)  # published numbers that do not reproduce
    footer: str = ""
    verdict: list[str] = field(
        default_factory=list
    )  # what the results say, in sentences; stands first

    @staticmethod
    def of_study(results: Results) -> Report:
        """A study as its data has it."""
        study = results.study
        sections = [Section.of_part(part, results.entries[part.name]) for part in study.parts]
        made = ", ".join(f"{name} {number}" for name, number in results.versions.items())
        footer = (
            f"{results.minutes:.1f} core-minutes of computing. {made}"
            if results.minutes >= 0.1
            else made
        )
        title = study.title or titled(study.parts[0])
        told = [f"{one.title}: {one.verdict[0]}" for one in sections if one.verdict]
        if len(sections) == 1:  # its verdict stands above it
            told, sections = sections[0].verdict, [dataclasses.replace(sections[0], verdict=[])]
        told = [text for text in (score_line(results), *told) if text]
        return Report(
            title, [study.about], sections, results.command, score(results)[1], footer, told
        )

    def write(self, out: Path, formats: Sequence[str]) -> list[Path]:
        """Write the report in the given formats; the files."""
        texts: dict[str, str] = {}
        if "html" in formats:
            from fedspan.study import page

            texts["index.html"] = page.render(self)
        if "md" in formats:
            head = [
                f"# {self.title}\n",
                *(f"{text}\n" for text in (*self.verdict, *self.lead) if text),
            ]
            texts["tables.md"] = "\n".join(
                [*head, *(section.markdown() for section in self.sections)]
            )
        if "csv" in formats:
            texts |= self._csv()
        make_dir(out)
        for name, text in texts.items():
            write_atomic(out / name, text.encode())
        return [
            *(out / name for name in texts),
            *(self._figures(out / "figures") if "png" in formats else []),
        ]

    def _csv(self) -> dict[str, str]:
        found, curves = [], []
        for one in self.sections:
            named = {"part": one.title} if len(self.sections) > 1 else {}
            found += [named | record for record in tables.records(one.part, one.entries)]
            for entry in one.entries:
                row = {"row": one.part.rows[entry.row].label} if len(one.part.rows) > 1 else {}
                curves.append((named | row, entry.series))
        return {"results.csv": tables.results_csv(found), "curves.csv": tables.curves_csv(curves)}

    def _figures(self, place: Path) -> list[Path]:
        from fedspan.study import figures

        drawn = [
            figures.draw(one.part, one.entries, place / one.part.name) for one in self.sections
        ]
        return [path.with_suffix(".png") for path in drawn]


def check(formats: Sequence[str]) -> None:
    """Refuse a format that is unknown, or whose library is missing, before anything is done."""
    for name in formats:
        one_of("format", name, FORMATS)
    if "html" in formats:
        needs("plot", "jinja2")
    if "png" in formats:
        needs("plot", "matplotlib")


def report(
    places: Sequence[Path], out: Path, formats: Sequence[str], metric: str | None, command: str
) -> list[Path]:
    """Show what some directories hold; the files that were written."""
    check(formats)
    if out.exists() and not out.is_dir():
        raise SpecError(f"--out {str(out)!r} is a file; give a directory for the results")
    return of_places(places, metric, command).write(out, formats)


def check_places(places: Sequence[Path]) -> None:
    """Refuse directories that do not exist."""
    for place in places:
        if not path_of("RUN_DIRS", place).exists():
            raise SpecError(
                f"{str(place)!r} does not exist; give directories that runs were written to"
            )


def of_places(places: Sequence[Path], metric: str | None, command: str) -> Report:
    """What some directories hold: the data of a study, or runs."""
    check_places(places)
    studies = [Report.of_study(data.load(place)) for place in places if data.has_data(place)]
    if len(studies) == len(places) == 1:
        return studies[0]
    others = [place for place in places if not data.has_data(place)]
    sections = [section for study in studies for section in study.sections]
    sections += (
        [Section.of_runs(title, series, metric) for title, series in find(others)] if others else []
    )
    count = sum(len(entry.series.seeds) for section in sections for entry in section.entries)
    lead = f"{count} run{'s' if count > 1 else ''} from {', '.join(map(str, places))}."
    footer = ", ".join(f"{name} {number}" for name, number in versions().items())
    title = (
        f"{count} runs on {len(sections)} tasks" if len(sections) > 1 else _of_methods(sections[0])
    )
    told = [text for study in studies for text in study.verdict]
    told += [standing(one.part, one.entries) for one in sections if not studies]
    return Report(
        title, [lead], sections, command, footer=footer, verdict=[text for text in told if text]
    )


def _of_methods(section: Section) -> str:
    """The methods of runs on one task, and the task."""
    methods = dict.fromkeys(entry.series.spec["method"]["name"] for entry in section.entries)
    return f"{listed(list(methods))} on {problem(section.part.base.get('task', {}))}"
