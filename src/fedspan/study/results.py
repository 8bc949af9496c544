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

from fedspan.core.errors import CheckpointError, FedspanError
from fedspan.core.files import make_dir, write_atomic
from fedspan.core.spec import Spec, read_toml
from fedspan.core.versions import versions
from fedspan.costs.plan import client_memory, price, projected, shapes
from fedspan.study.budget import Budget, sized
from fedspan.study.curves import Axis, Curve, Tail
from fedspan.study.jobs import seconds
from fedspan.study.model import Part, Point, Study, Table, Variant
from fedspan.study.parse import study_of, table_of
from fedspan.study.series import Series
from fedspan.study.tuning import Cell, Runs, Tried, by_seed, edges, final, within

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
    ends: list[float] = field(
        default_factory=list
    )  # the result of each seed; nan: it diverged or failed
    found_lr: list[float] = field(default_factory=list)  # what `lr = "search"` found, per run
    at: dict[str, Tail] = field(default_factory=dict)  # heading of a column → result at that cost
    reached: list[float] | None = None  # rounds, bytes up and bytes both ways to the row's target
    tried: list[Tried] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    client_state: int | None = None  # bytes
    client_memory: int | None = None  # bytes
    test_examples: int | None = None  # of the test set
    projected: list[int] | None = (
        None  # parameters that are projected, values that are sent, all parameters
    )
    events: list[str] = field(
        default_factory=list
    )  # the first event of each kind and seed, and how many

    @property
    def notes(self) -> list[str]:
        """What went wrong, with the name of the method."""
        return [f"{self.series.label}, {event}" for event in self.events]

    def curve(self, part: Part) -> Curve:
        """The rows that count, in the metric of the part."""
        curve = self.series.curve(part.metric)
        return within(part, curve) if self.until is None else curve.until(self.until)


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
    for cell in runs.cells():
        entries[cell[0].name].append(_entry(cell, runs))
    return Results(study, entries, command, seconds(runs.jobs()) / 60, versions())


def _entry(cell: Cell, runs: Runs) -> Entry:
    part, row, variant = cell
    series, curve, spec = (
        runs.series(cell),
        runs.curve(cell),
        part.spec(variant, runs.point(cell), row),
    )
    number = next(n for n, one in enumerate(part.rows) if one is row)
    return Entry(
        number, variant.name, series.thin(), final(part, curve), within(part, curve).best(part.goal),
        point=runs.point(cell), at_edge=bool(edges(variant, runs.point(cell))), at=_at(cell, runs),
        until=None if part.budget is None else int(within(part, curve).rounds[-1]),
        ends=by_seed(part, curve), found_lr=runs.found_lr(cell),
        reached=None if row.target is None else runs.reached(cell),
        tried=[dataclasses.replace(one, deciding=None, curve=None) for one in runs.tried(cell)],
        failures=runs.failures(cell), client_state=client_state(spec), client_memory=client_memory(spec),
        events=runs.events(cell), **known_of(spec),
    )  # fmt: skip


def _at(cell: Cell, runs: Runs) -> dict[str, Tail]:
    """Results at equal cost, for a part with one row."""
    part, row, _ = cell
    if len(part.rows) > 1:
        return {}
    axes: list[Axis] = ["up", "total"]
    if part.budget is None:
        costs = {axis: runs.equal_cost(part, row, axis) for axis in axes}
        words = {"up": "up", "total": "both ways"}
        return {
            f"at {sized(cost)} {words[axis]}": runs.at(cell, axis, cost)
            for axis, cost in costs.items()
        }
    limits = part.budget.limits
    costs = {
        axis: runs.equal_cost(part, row, axis)
        for axis in ("total", "round")
        if set(limits) != {axis}
    }
    return {
        f"{Budget({axis: cost}).words()}, best of grid": runs.tuned_at(cell, axis, cost)
        for axis, cost in costs.items()
    }


def client_state(spec: Spec | Table) -> int | None:
    """Bytes that a client keeps between rounds beside its copy of the model; None if the spec alone does not tell."""
    try:
        spec = spec if isinstance(spec, Spec) else Spec.from_table(spec)
        return price(dataclasses.replace(spec, rounds=1)).client_state
    except (FedspanError, OSError, ImportError):  # a plugin's method, or data that is not here
        return None


def known_of(spec: Spec | Table) -> Table:
    """Fields of an entry that follow from the model and the test set; none of them where these are not here."""
    try:
        spec = spec if isinstance(spec, Spec) else Spec.from_table(spec)
        sizes = projected(spec)
        return {
            "test_examples": shapes(spec).test_examples,
            "projected": None if sizes is None else list(sizes),
        }
    except (FedspanError, OSError, ImportError):
        return {}


# ---- files


def announce(study: Study, out: Path, line: str) -> str:
    """Write what will be run and by which command; results of an earlier study are no longer valid.

    Returns:
        The commands that lead to this study, one per line: the first one, and those that changed it when they resumed.
    """
    make_dir(out)
    (out / CURVES).unlink(missing_ok=True)
    text = tomli_w.dumps(table_of(study))
    before = (
        (out / STUDY).read_text("utf-8")
        if (out / STUDY).exists() and "--resume" in line.split()
        else ""
    )
    lines = [one.removeprefix(MADE_BY) for one in before.splitlines() if one.startswith(MADE_BY)]
    if not lines:
        lines = [line.replace(" --resume", "")]
    elif not before.endswith(f"\n{text}"):
        lines.append(line)
    write_atomic(out / STUDY, "\n".join([*(MADE_BY + one for one in lines), text]).encode())
    return "\n".join(lines)


def save(results: Results, out: Path) -> None:
    """Write the results. Runs that several entries share are written once."""
    runs: dict[str, int] = {}
    parts = {
        name: [_entry_table(one, runs) for one in entries]
        for name, entries in results.entries.items()
    }
    about: Table = {"study": _digest(out / STUDY)} if (out / STUDY).exists() else {}
    about |= {
        "command": results.command,
        "minutes": round(results.minutes, 1),
        "versions": results.versions,
    }
    text = f'{_json(about | {"parts": parts})[:-1]},"runs":[\n' + ",\n".join(runs) + "\n]}\n"
    write_atomic(
        out / CURVES, gzip.compress(text.encode(), mtime=0)
    )  # without a time: the same results, the same bytes


def _entry_table(entry: Entry, runs: dict[str, int]) -> Table:
    run = runs.setdefault(_json(entry.series.to_json()), len(runs))
    plain = {
        f.name: getattr(entry, f.name) for f in dataclasses.fields(entry) if f.name != "series"
    }
    plain |= {
        "final": _numbers(entry.final),
        "best": _numbers(entry.best),
        "ends": _short(entry.ends),
    }
    plain["at"] = {name: _numbers(tail) for name, tail in entry.at.items()}
    plain["tried"] = [
        [one.point, one.rounds, _numbers(one.end), *([True] if one.dropped else [])]
        for one in entry.tried
    ]
    return {"run": run} | {
        key: value for key, value in plain.items() if value not in (None, [], {}, False)
    }


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
            part.name: [_from_table(one, part, data["runs"]) for one in data["parts"][part.name]]
            for part in study.parts
        }
        return Results(study, entries, data["command"], data["minutes"], data["versions"])
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError(
            f"{str(place / CURVES)!r} does not hold the results of {STUDY}: {error!r}"
        ) from None


def _digest(path: Path) -> str:
    """A hash of what a study's file says, without its comments."""
    return hashlib.blake2b(
        json.dumps(tomllib.loads(path.read_text("utf-8"))).encode(), digest_size=6
    ).hexdigest()


def _from_table(table: Table, part: Part, runs: list[Table]) -> Entry:
    variant: Variant = part.variant(table["variant"])
    plain: dict[str, Any] = {key: value for key, value in table.items() if key != "run"}
    plain |= {
        "final": _tail(table["final"]),
        "best": _tail(table["best"]),
        "row": table.get("row", 0),
    }
    plain["ends"] = [math.nan if value is None else value for value in table.get("ends", [])]
    plain["at"] = {name: _tail(numbers) for name, numbers in table.get("at", {}).items()}
    plain["tried"] = [
        Tried(point, rounds, _tail(end), dropped=bool(dropped))
        for point, rounds, end, *dropped in table.get("tried", [])
    ]
    return Entry(series=Series.from_json(runs[table["run"]], variant.label, variant.color), **plain)


def _numbers(tail: Tail) -> list[float | None]:
    return _short(dataclasses.astuple(tail))


def _short(values: Iterable[float]) -> list[float | None]:
    short = (float(f"{value:.8g}") for value in values)
    return [
        None if value != value else int(value) if value.is_integer() else value for value in short
    ]


def _tail(numbers: list[float | None]) -> Tail:
    mean, spread, *counts = (float("nan") if value is None else value for value in numbers)
    return Tail(mean, spread, *map(int, counts))


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
