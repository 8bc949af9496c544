"""`fedspan report`: page, Markdown, CSV and figures of studies saved as data, and of any directories with runs.

Every section is made of a part and its entries. Runs that belong to no study are shown as one part per task, in which
every spec is a variant. A report reads what runs have recorded, and builds no task.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedspan.core.errors import SpecError, one_of, path_of
from fedspan.core.extras import needs, versions
from fedspan.core.files import csv_text, make_dir, write_atomic
from fedspan.engine.history import higher_is_better, main_metric, sign_of
from fedspan.study import results as data
from fedspan.study import tables
from fedspan.study.curves import Goal, Series, find
from fedspan.study.model import COLORS, Part, Study, Variant
from fedspan.study.results import Entries, Entry, Results
from fedspan.study.tables import TextTable
from fedspan.study.verdict import described, said, standing, title_of

FORMATS = ("html", "md", "csv", "png")
TABLES = (tables.results, tables.published, tables.runs, tables.tuning)  # of a section


@dataclass(frozen=True)
class Section:
    """A section of the page and of the Markdown, rows of the CSV: a part with its tables, or tables and drawings."""

    title: str
    about: str
    tables: list[TextTable]  # the first stands open on the page, the others are folded away
    notes: Sequence[str] = ()
    verdict: Sequence[str] = ()  # what the results say, in sentences
    part: Part | None = None
    entries: Entries = ()
    drawings: Sequence[Path] = ()  # SVG files


@dataclass(frozen=True)
class Report:
    """Sections under one title."""

    title: str
    lead: str
    sections: list[Section]
    command: str
    footer: str = ""
    score: str = ""  # how many published numbers are reproduced
    verdict: Sequence[str] = ()  # what the results say, in sentences

    @property
    def told(self) -> list[str]:
        """Return what stands first."""
        return [text for text in (self.score, *self.verdict) if text]

    def write(self, out: Path, formats: Sequence[str]) -> list[Path]:
        """Write the report in the given formats and return the files."""
        texts, files = dict[str, str](), list[Path]()
        parts = [(one.title, one.part, one.entries) for one in self.sections if one.part]
        if "html" in formats:
            from fedspan.study import page

            texts["index.html"] = page.render(self)
        if "md" in formats:
            texts["tables.md"] = self._markdown()
        if "csv" in formats:
            lines = []
            for title, part, entries in parts:
                for entry, numbers in zip(entries, tables.rows(part, entries), strict=True):
                    named = {"part": title, "row": part.rows[entry.row].label}
                    lines.append({key: text for key, text in named.items() if text} | numbers)
            texts["results.csv"] = csv_text(lines)
        make_dir(out)
        for name, text in texts.items():
            files.append(out / name)
            write_atomic(files[-1], text.encode())
        if "png" in formats:
            from fedspan.study import figures

            for _, part, entries in parts:
                drawn = figures.draw(part, entries, out / "figures" / part.name)
                files.append(drawn.with_suffix(".png"))
        return files

    def _markdown(self) -> str:
        texts = [f"# {self.title}", *self.told, self.lead]
        for one in self.sections:
            texts += [f"## {one.title}", one.about, " ".join(one.verdict)]
            for table in one.tables:
                texts += [f"### {table.title}" if table.title else "", table.markdown().rstrip()]
            texts.append("\n".join(f"- {note}" for note in one.notes))
            if any(entry.client_memory is not None for entry in one.entries):
                texts.append(tables.MEMORY_NOTE)
        return "\n\n".join(filter(None, texts)) + "\n"


def of_study(results: Results) -> Report:
    """Return the report of a study from its data."""
    study, sections = results.study, []
    for part in study.parts:
        entries = results.entries[part.name]
        made = [one(part, entries) for one in TABLES]
        failed = [f"failed: {line}" for entry in entries for line in entry.failures]
        events = [note for entry in entries for note in entry.notes]
        notes = [*tables.orders(part, entries), *dict.fromkeys(failed), *events]
        title, about = part.title or "Results", part.about or described(part, entries)
        shown = [one for one in made if one.rows]
        sections.append(Section(title, about, shown, notes, said(part, entries), part, entries))
    footer = _listed(results.versions)
    if results.minutes >= 0.1:
        footer = f"{results.minutes:.1f} core-minutes of computing. {footer}"
    told: Sequence[str] = [f"{one.title}: {one.verdict[0]}" for one in sections if one.verdict]
    if len(sections) == 1:  # its verdict stands above it
        told, sections = sections[0].verdict, [dataclasses.replace(sections[0], verdict=())]
    score = tables.score(results)
    return Report(titled(study), study.about, sections, results.command, footer, score, told)


def titled(study: Study) -> str:
    """Return the title of a study, or what it compares on what."""
    part = study.parts[0]
    labels = [variant.label for variant in part.variants]
    return study.title or title_of(labels, part.base.get("task", {}))


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items())


def _of_runs(title: str, series: list[Series], metric: str | None) -> Section:
    """Return the section of runs on one task that were found somewhere."""
    known = [name for name in series[0].metrics if all(name in one.metrics for one in series)]
    if metric is not None:
        one_of("metric", metric, known)
    if not known:
        raise SpecError("the runs report no metric to compare by; give them a test set")
    given = series[0].spec.get("metrics", ())
    sure = [name for name in known if higher_is_better(name, given) is not None]
    metric = metric or main_metric(sure or known, given)
    goal: Goal = "max" if sign_of(metric, given, option="") > 0 else "min"
    variants = [Variant(one.label, one.label, "", {}, {}) for one in series]
    part = Part(name="runs", base=series[0].spec, variants=variants, metric=metric, goal=goal)
    entries, notes = [], []
    for one in series:
        curve = one.curve(metric)
        ends = curve.tail(1), curve.best(goal)
        entries.append(Entry(0, one.label, one.thin(), *ends, **one.costs))
        for seed, t in one.unfinished.items():
            notes.append(f"{one.label}: seed {seed} is at round {t} of {one.spec['rounds']}")
    best = tables.ranked(part, entries)  # the best ones get the most distinct colors
    for n, entry in enumerate(entries):
        color = COLORS[best.index(entry) % len(COLORS)]
        entries[n] = dataclasses.replace(
            entry, series=dataclasses.replace(entry.series, color=color)
        )
    table = dataclasses.replace(tables.runs(part, entries), title="")
    return Section(title, "", [table], notes, [], part, entries)


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
    studies = [of_study(data.load(place)) for place in places if data.has_data(place)]
    if len(studies) == len(places) == 1:
        return studies[0]
    others = [place for place in places if not data.has_data(place)]
    sections = [section for study in studies for section in study.sections]
    sections += [_of_runs(title, series, metric) for title, series in find(others)]
    count = sum(len(entry.series.seeds) for section in sections for entry in section.entries)
    lead = f"{count} run{'s' if count > 1 else ''} from {', '.join(map(str, places))}."
    title = f"{count} runs on {len(sections)} tasks"
    if len(sections) == 1:
        (one,) = sections
        specs = [entry.series.spec for entry in one.entries]
        methods = dict.fromkeys(spec["method"]["name"] for spec in specs)
        title = title_of(list(methods), specs[0].get("task", {}))
    told = [text for study in studies for text in study.told]
    told += [standing(one.part, one.entries) for one in sections if one.part and not studies]
    return Report(title, lead, sections, command, footer=_listed(versions()), verdict=told)
