"""Results of a study as data: what the tables say in full, and curves thinned to what a chart can show.

`collect` reads them from the runs, `save` writes them to two files, and `load` reads them back. Tables, figures and
the page are made from these files alone.

    study.toml      what was run
    curves.json.gz  the results and curves of every part, row and variant
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import math
import tomllib
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from fedspan.core.errors import CheckpointError
from fedspan.core.extras import versions
from fedspan.core.files import make_dir, write_atomic
from fedspan.core.spec import read_toml
from fedspan.study.budget import Budget, sized
from fedspan.study.curves import Axis, Curve, Series, Table, Tail
from fedspan.study.jobs import seconds
from fedspan.study.model import Part, Point, Study, study_of, table_of
from fedspan.study.tuning import Cell, Runs, Tried, by_seed, edges

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
    events: list[str] = field(default_factory=list)  # the first of each kind and seed

    @property
    def notes(self) -> list[str]:
        """What went wrong, with the name of the method."""
        return [f"{self.series.label}, {event}" for event in self.events]

    def curve(self, part: Part) -> Curve:
        """The rows that count, in the metric of the part."""
        curve = self.series.curve(part.metric)
        return part.inside(curve) if self.until is None else curve.until(self.until)


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
        found = Entry(
            row=next(n for n, one in enumerate(part.rows) if one is cell.row),
            variant=cell.variant.name,
            series=cell.series.thin(),
            final=part.result(curve),
            best=inside.best(part.goal),
            point=cell.point,
            at_edge=bool(edges(cell.variant, cell.point)),
            at=_at(cell),
            until=None if part.budget is None else int(inside.rounds[-1]),
            ends=by_seed(part, curve),
            found_lr=cell.found_lr,
            reached=cell.reached,
            tried=[dataclasses.replace(one, deciding=None, curve=None) for one in cell.tried],
            failures=cell.failures,
            events=cell.events,
            **cell.series.costs,
        )
        entries[part.name].append(found)
    return Results(study, entries, command, seconds(runs.jobs()) / 60, versions())


def _at(cell: Cell) -> dict[str, Tail]:
    """Results at equal cost, for a part with one row."""
    part = cell.part
    if len(part.rows) > 1:
        return {}
    axes: tuple[Axis, ...] = ("up", "total") if part.budget is None else ("total", "round")
    found = {}
    for axis in axes:
        cost = cell.equal_cost(axis)
        if part.budget is None:
            words = {"up": "up", "total": "both ways"}[axis]
            found[f"at {sized(cost)} {words}"] = cell.at(axis, cost)
        elif set(part.budget.limits) != {axis}:
            words = Budget({axis: cost}).words()
            found[f"{words}, best of grid"] = cell.tuned_at(axis, cost)
    return found


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
    write_atomic(path, "\n".join([*(MADE_BY + one for one in lines), text]).encode())
    return "\n".join(lines)


def save(results: Results, out: Path) -> None:
    """Write the results. Runs that several entries share are written once."""
    runs: dict[str, int] = {}
    parts: dict[str, list[Table]] = {name: [] for name in results.entries}
    for name, entries in results.entries.items():
        for one in entries:
            run = runs.setdefault(_json(one.series.to_json()), len(runs))
            fields = (f.name for f in dataclasses.fields(one) if f.name != "series")
            plain = {name: getattr(one, name) for name in fields}
            plain |= {"final": _numbers(one.final), "best": _numbers(one.best)}
            plain |= {"ends": _short(one.ends)}
            plain["at"] = {heading: _numbers(tail) for heading, tail in one.at.items()}
            plain["tried"] = [
                [tried.point, tried.rounds, _numbers(tried.end), *([True] if tried.dropped else [])]
                for tried in one.tried
            ]
            known = {
                key: value for key, value in plain.items() if value not in (None, [], {}, False)
            }
            parts[name].append({"run": run} | known)
    about: Table = {"study": _digest(out / STUDY)} if (out / STUDY).exists() else {}
    about |= {"command": results.command, "minutes": round(results.minutes, 1)}
    head = _json(about | {"versions": results.versions, "parts": parts})
    text = f'{head[:-1]},"runs":[\n' + ",\n".join(runs) + "\n]}\n"
    write_atomic(out / CURVES, gzip.compress(text.encode(), mtime=0))  # the same bytes every time


def has_data(place: Path) -> bool:
    """Whether a directory holds the results of a study."""
    return (place / STUDY).is_file() and (place / CURVES).is_file()


def load(place: Path) -> Results:
    """The results that were saved in a directory."""
    study = study_of(read_toml(place / STUDY))
    try:
        data = json.loads(gzip.decompress((place / CURVES).read_bytes()))
        if data.get("study", digest := _digest(place / STUDY)) != digest:
            raise ValueError(
                "they are of another study, or it was changed; run the comparison again"
            )
        entries = {
            part.name: [_entry(one, part, data["runs"]) for one in data["parts"][part.name]]
            for part in study.parts
        }
        return Results(study, entries, data["command"], data["minutes"], data["versions"])
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError(
            f"{str(place / CURVES)!r} does not hold the results of {STUDY}: {error!r}"
        ) from None


def _entry(table: Table, part: Part, runs: list[Table]) -> Entry:
    variant = part.variant(table["variant"])
    plain: dict[str, Any] = {"row": 0} | {key: table[key] for key in table if key != "run"}
    plain |= {"final": _tail(table["final"]), "best": _tail(table["best"])}
    plain["ends"] = [math.nan if value is None else value for value in table.get("ends", [])]
    plain["at"] = {name: _tail(numbers) for name, numbers in table.get("at", {}).items()}
    plain["tried"] = [
        Tried(point, rounds, _tail(end), dropped=bool(dropped))
        for point, rounds, end, *dropped in table.get("tried", [])
    ]
    return Entry(series=Series.from_json(runs[table["run"]], variant.label, variant.color), **plain)


def _digest(path: Path) -> str:
    """A hash of what a study's file says, without its comments."""
    text = json.dumps(tomllib.loads(path.read_text("utf-8")))
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _numbers(tail: Tail) -> list[float | None]:
    return _short(dataclasses.astuple(tail))


def _short(values: Iterable[float]) -> list[float | None]:
    """Numbers with eight digits; nan is null."""
    short = (float(f"{value:.8g}") for value in values)
    return [
        None if value != value else int(value) if value.is_integer() else value for value in short
    ]


def _tail(numbers: list[float | None]) -> Tail:
    mean, spread, *counts = (math.nan if value is None else value for value in numbers)
    return Tail(mean, spread, *map(int, counts))


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
