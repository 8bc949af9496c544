"""Results of a study as data: what the tables say in full, and curves thinned to what a chart can show.

`collect` reads them from the runs, `save` writes them to two files, and `load` reads them back. Tables, figures and
the page are made from these files alone.

    study.toml      what was run
    curves.json.gz  the results and curves of every part, row and variant
"""

from __future__ import annotations

import gzip
import json
import tomllib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from fedspan.core.digest import digest
from fedspan.core.errors import CheckpointError
from fedspan.core.extras import versions
from fedspan.core.files import make_dir, write_atomic
from fedspan.core.spec import read_toml
from fedspan.study.budget import Budget
from fedspan.study.curves import Axis, Series, Table, Tail
from fedspan.study.jobs import seconds
from fedspan.study.model import Case, Part, Point, Study, study_of, table_of
from fedspan.study.tuning import Runs, Tried, by_seed, edges

STUDY, CURVES, RUNS = "study.toml", "curves.json.gz", "runs"
MADE_BY = "# "  # before the commands at the head of the study


@dataclass(frozen=True)
class Entry:
    """The results of one variant in one row of a part."""

    row: int
    variant: str
    series: Series
    final: Tail
    best: Tail
    point: Point = field(default_factory=dict)
    at_edge: bool = False  # whether the point lies at an end of its grid
    until: int | None = None  # the last round within the budget; None: all rounds count
    ends: list[float] = field(default_factory=list)  # of each seed; nan: it diverged or failed
    found_lr: list[float] = field(default_factory=list)  # what `lr = "search"` found, per run
    at: dict[str, Tail] = field(default_factory=dict)  # heading of a column → result at that cost
    reached: list[float] | None = None  # rounds, bytes up and bytes both ways to the row's target
    tried: list[Tried] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    client_state: int | None = None  # bytes
    client_memory: int | None = None  # bytes
    test_examples: int | None = None  # of the test set
    projected: list[int] | None = None  # parameters projected, values sent, all parameters
    clients_per_round: int | None = None
    local_steps: int | None = None
    events: list[str] = field(default_factory=list)  # the first of each kind and seed

    @property
    def label(self) -> str:
        """The name of the variant in tables and charts."""
        return self.series.label

    @property
    def settings(self) -> dict[str, Any]:
        """The tuned settings, such as `{"lr": 0.1}`; a searched step is the first seed's."""
        return short(self.point) | ({"lr": self.found_lr[0]} if self.found_lr else {})

    @property
    def notes(self) -> list[str]:
        """What went wrong, with the name of the method."""
        return [f"{self.label}, {event}" for event in self.events]

    def curve(self, part: Part) -> Series:
        """The rows that count, in the metric of the part."""
        curve = self.series.curve(part.metric)
        return part.inside(curve) if self.until is None else curve.until(self.until)


Entries = Sequence[Entry]


def short(point: Mapping[str, Any]) -> dict[str, Any]:
    """Return a point with the method's own names of settings."""
    return {key.removeprefix("method."): value for key, value in point.items()}


def by_row(part: Part, entries: Entries) -> list[tuple[Case, list[Entry]]]:
    """Return every row of a part with its entries."""
    return [(row, [one for one in entries if one.row == n]) for n, row in enumerate(part.rows)]


@dataclass(frozen=True)
class Results:
    """All entries of a study, by part."""

    study: Study
    entries: dict[str, list[Entry]]
    command: str
    minutes: float  # of computing, all runs
    versions: dict[str, str]


def collect(study: Study, place: Path, command: str) -> Results:
    """Read the results of a study from its runs."""
    runs = Runs(study, place)
    entries: dict[str, list[Entry]] = {part.name: [] for part in study.parts}
    for cell in runs.cells:
        part, curve = cell.part, cell.curve
        inside = part.inside(curve)
        at: dict[str, Tail] = {}  # results at equal cost
        axes: tuple[Axis, ...] = ("up", "total") if part.budget is None else ("total", "round")
        for axis in axes if len(part.rows) == 1 else ():
            cost = cell.equal_cost(axis)
            if part.budget is None or set(part.budget.limits) != {axis}:
                at[f"at {Budget({axis: cost}).words()}"] = cell.at(axis, cost)
        found = Entry(
            row=part.rows.index(cell.row),
            variant=cell.variant.name,
            series=cell.series.thin(),
            final=part.result(curve),
            best=inside.best(part.goal),
            point=cell.point,
            at_edge=bool(edges(cell.variant, cell.point)),
            at=at,
            until=None if part.budget is None else int(inside.rounds[-1]),
            ends=by_seed(part, curve),
            found_lr=cell.found_lr,
            reached=cell.reached,
            tried=cell.tried,
            failures=cell.failures,
            events=cell.events,
            **cell.series.costs,
        )
        entries[part.name].append(found)
    return Results(study, entries, command, seconds(runs.jobs()) / 60, versions())


# ---- files


def announce(study: Study, out: Path, line: str) -> str:
    """Write what will be run and by which command; results of an earlier study are no longer valid.

    Returns:
        The commands that lead to this study, one per line: the first one, and those that changed it when they resumed.
    """
    make_dir(out)
    (out / CURVES).unlink(missing_ok=True)
    text, path = tomli_w.dumps(table_of(study)), out / STUDY
    resumed = path.exists() and "--resume" in line.split()
    before = path.read_text("utf-8") if resumed else ""
    lines = [one.removeprefix(MADE_BY) for one in before.splitlines() if one.startswith(MADE_BY)]
    if not lines:
        lines = [line.replace(" --resume", "")]
    elif not before.endswith(f"\n{text}"):
        lines.append(line)
    write_atomic(path, "\n".join([*(MADE_BY + one for one in lines if one), text]).encode())
    return "\n".join(lines)


def save(results: Results, out: Path) -> None:
    """Write the results. Runs that several entries share are written once."""
    runs: dict[str, int] = {}

    def plain(value: Series | Tried) -> Any:
        if isinstance(value, Series):
            return runs.setdefault(_json(value.to_json()), len(runs))
        return [value.point, value.rounds, value.end, value.dropped]

    parts = {}
    for name, entries in results.entries.items():
        kept = [
            {k: v for k, v in vars(one).items() if v not in (None, [], {}, False)}
            for one in entries
        ]
        parts[name] = [{"run": one.pop("series")} | one for one in kept]
    about = {
        "study": _digest(out / STUDY),
        "command": results.command,
        "minutes": round(results.minutes, 1),
        "versions": results.versions,
        "parts": parts,
    }
    text = f'{_json(about, plain)[:-1]},"runs":[\n' + ",\n".join(runs) + "\n]}\n"
    write_atomic(out / CURVES, gzip.compress(text.encode(), mtime=0))  # the same bytes every time


def has_data(place: Path) -> bool:
    """Return whether a directory holds the results of a study."""
    return (place / STUDY).is_file() and (place / CURVES).is_file()


def load(place: Path) -> Results:
    """Return the results that were saved in a directory."""
    study, entries = study_of(read_toml(place / STUDY)), {}
    try:
        data = json.loads(gzip.decompress((place / CURVES).read_bytes()))
        if data["study"] != _digest(place / STUDY):
            raise ValueError(
                "they are of another study, or it was changed; run the comparison again"
            )
        for part in study.parts:
            entries[part.name] = [
                _entry(one, part, data["runs"]) for one in data["parts"][part.name]
            ]
        return Results(study, entries, data["command"], data["minutes"], data["versions"])
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError(
            f"{str(place / CURVES)!r} does not hold the results of {STUDY}: {error!r}"
        ) from None


def _entry(table: Table, part: Part, runs: list[Table]) -> Entry:
    plain: Table = {"row": 0, "at": {}, "tried": []} | table
    variant, run = part.variant(plain["variant"]), runs[plain.pop("run")]
    plain |= {key: Tail(*plain[key]) for key in ("final", "best")}
    plain["at"] = {heading: Tail(*numbers) for heading, numbers in plain["at"].items()}
    plain["tried"] = [
        Tried(point, rounds, Tail(*end), dropped) for point, rounds, end, dropped in plain["tried"]
    ]
    return Entry(series=Series.from_json(run, variant.label, variant.color), **plain)


def _digest(path: Path) -> str:
    """Return a hash of what a study's file says, without its comments."""
    return digest(json.dumps(tomllib.loads(path.read_text("utf-8"))), size=6)


def _json(value: Any, default: Any = None) -> str:
    return json.dumps(value, separators=(",", ":"), default=default)
