"""Histories as curves over seeds, series of runs found in directories, and the Pareto front of several series.

A curve is one metric of one spec under all its seeds, with what was spent. A series has the curves of every metric: one
line of a chart, one row of a table.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedspan.core.errors import CheckpointError, FedspanError, SpecError
from fedspan.core.json_log import check_form, read_table
from fedspan.core.spec import Spec, flat
from fedspan.engine import history
from fedspan.engine.history import PLAIN
from fedspan.engine.loop import Line
from fedspan.engine.provenance import OUTCOME, check_run

RECORDED = {"client_state": int, "client_memory": int, "test_examples": int, "projected": list[int]}
POINTS = 120  # rows of a curve that are kept
SPENT = ("rounds", "up", "down", "seconds")
Table = dict[str, Any]
Floats = npt.NDArray[np.float64]
Goal = Literal["max", "min"]
Axis = Literal["round", "up", "total", "seconds"]
BYTES: tuple[Axis, ...] = ("up", "total")
TITLES: dict[Axis, str] = {  # {} is the unit of bytes
    "round": "round",
    "up": "{} sent up, all clients",
    "total": "{} sent, both directions, all clients",
    "seconds": "seconds of training",
}


@dataclass(frozen=True)
class Tail:
    """A result over seeds: mean, standard deviation, and how many seeds have none."""

    mean: float
    spread: float
    diverged: int
    seeds: int
    failed: int = 0
    undefined: int = 0  # seeds whose metric is not a number, although they did not diverge

    @property
    def whole(self) -> bool:
        """Whether every seed has a result."""
        return not self.lost and math.isfinite(self.mean)

    @property
    def lost(self) -> dict[str, int]:
        """Why seeds have no result → how many."""
        counts = {"diverged": self.diverged, "failed": self.failed, "NaN": self.undefined}
        return {word: count for word, count in counts.items() if count}

    def text(self, value: str, spread: str) -> str:
        """In words, with the mean and the spread as the caller writes them."""
        if sum(self.lost.values()) == self.seeds:
            return next(iter(self.lost))
        text = value if math.isnan(self.spread) else f"{value} ± {spread}"
        gone = ", ".join(f"{n} of {self.seeds} {word}" for word, n in self.lost.items())
        return f"{text} ({gone})" if gone else text


@dataclass(frozen=True)
class Curve:
    """One metric of one spec over all seeds; rows that a seed does not have, or has after diverging, are nan."""

    rounds: Floats
    values: Floats  # (seeds, rows)
    up: Floats  # (rows,), mean over seeds
    down: Floats
    seconds: Floats
    diverged: list[int | None]  # round, per seed
    failed: list[bool]  # per seed
    up_most: Floats | None = None  # (rows,), of the seed that has sent most; None: the mean
    total_most: Floats | None = None  # the same in both directions

    @staticmethod
    def of(runs: Sequence[Sequence[Line]], metric: str) -> Curve:
        """From one list of rows per seed; a seed that failed has none.

        Only rounds count that all seeds have which got so far: a run that was extended has a row at its old end. What
        was spent never falls when a seed drops out.
        """
        by_round = [{row["round"]: row for row in rows} for rows in runs]
        ends = [max(rows, default=-1) for rows in by_round]
        rounds = sorted(
            t
            for t in set[int]().union(*by_round)
            if all(t in rows or end < t for rows, end in zip(by_round, ends, strict=True))
        )
        there = [[rows[t] for rows in by_round if t in rows] for t in rounds]

        def spent(over_seeds: Any, *names: str) -> Floats:
            sums = [
                over_seeds([sum(row[name] for name in names) for row in rows]) for rows in there
            ]
            return np.maximum.accumulate(np.array(sums or [0.0], float))

        def value(row: Line | None) -> float:
            found = None if row is None or row.get("diverged") else row.get(metric)
            return math.nan if found is None else float(found)

        lasts = [rows[-1] if rows else {} for rows in runs]
        return Curve(
            rounds=np.array(rounds or [0], float),
            values=np.array([[value(rows.get(t)) for t in rounds or [0]] for rows in by_round]),
            up=spent(np.mean, "up_bytes"),
            down=spent(np.mean, "down_bytes"),
            seconds=spent(np.mean, "seconds"),
            diverged=[last["round"] if last.get("diverged") else None for last in lasts],
            failed=[not rows for rows in runs],
            up_most=spent(max, "up_bytes"),
            total_most=spent(max, "up_bytes", "down_bytes"),
        )

    def spent(self, axis: Axis) -> Floats:
        """What was spent up to each row."""
        costs = {"round": self.rounds, "up": self.up, "seconds": self.seconds}
        return self.up + self.down if axis == "total" else costs[axis]

    def most(self, axis: Axis) -> Floats:
        """What any seed has spent at most up to each row."""
        known = {"up": self.up_most, "total": self.total_most}.get(axis)
        return self.spent(axis) if known is None else known

    def until(self, rounds: int) -> Curve:
        """The rows up to a round; a seed that diverged later has not diverged here."""
        rows = int(np.searchsorted(self.rounds, rounds, side="right"))
        diverged = [t if t is not None and t <= rounds else None for t in self.diverged]
        return replace(self.at_rows(np.arange(rows)), diverged=diverged)

    def within(self, limits: dict[Axis, float]) -> Curve:
        """The rows at which every seed has spent no more than some limits; at least the first."""
        rows = [np.searchsorted(self.most(a), limits[a], side="right") for a in limits]
        return self.until(int(self.rounds[max(int(min(rows)), 1) - 1])) if rows else self

    def at_rows(self, rows: npt.NDArray[np.int64]) -> Curve:
        """Some of the rows."""
        names = (*SPENT, "up_most", "total_most")
        cut = {name: known[rows] for name in names if (known := getattr(self, name)) is not None}
        return replace(self, values=self.values[:, rows], **cut)

    def alive(self) -> list[int]:
        """The seeds that neither diverged nor failed."""
        gone = zip(self.diverged, self.failed, strict=True)
        return [n for n, (t, lost) in enumerate(gone) if t is None and not lost]

    def ends(self, last: int) -> Floats:
        """Mean over the last evaluations, for each seed that is alive; nan if none is."""
        alive = self.alive()
        return self.values[alive, -last:].mean(1) if alive else np.array([np.nan])

    def tail(self, last: int) -> Tail:
        """The same, over seeds."""
        return self._over_seeds(self.ends(last))

    def best(self, goal: Goal) -> Tail:
        """The best evaluation of each seed, including seeds that diverged later."""
        pick = np.nanmax if goal == "max" else np.nanmin
        tops = [pick(row) for row in self.values if np.isfinite(row).any()]
        found = self._over_seeds(np.array(tops) if tops else np.full(len(self.alive()), np.nan))
        return replace(found, diverged=0) if tops else found

    def _over_seeds(self, values: Floats) -> Tail:
        known = values[np.isfinite(values)]
        mean = float(known.mean()) if len(known) else math.nan
        spread = float(known.std(ddof=1)) if len(known) > 1 else math.nan
        gone, failed = sum(t is not None for t in self.diverged), sum(self.failed)
        undefined = len(values) - len(known) if gone + failed < len(self.diverged) else 0
        return Tail(mean, spread, gone, len(self.diverged), failed, undefined)


def over_seeds(values: Floats) -> tuple[Floats, Floats, Floats]:
    """Mean, lowest and highest over the seeds that have a row; nan if none has."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # rows in which every seed has diverged
        return np.nanmean(values, 0), np.nanmin(values, 0), np.nanmax(values, 0)


def rounded(values: Floats, digits: int = 6) -> list[float | int | None]:
    """Numbers with so many digits for JSON; what is not finite is null."""
    short = (float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in values)
    return [int(value) if value is not None and value.is_integer() else value for value in short]


@dataclass(frozen=True, eq=False)
class Series:
    """Curves of every metric; if all seeds failed, there is one empty curve without a name."""

    label: str
    color: str  # empty: chosen when it is drawn
    spec: Table  # resolved
    seeds: tuple[int, ...]
    curves: dict[str, Curve]
    unfinished: dict[int, int] = field(default_factory=dict)  # seed → round, if it can go on
    costs: Table = field(default_factory=dict)  # what the runs have recorded

    @staticmethod
    def of(
        label: str, color: str, spec: Table, seeds: Sequence[int], runs: Sequence[Sequence[Line]]
    ) -> Series:
        """From the rows of every seed; a seed that failed has none."""
        known = [[name for name in rows[0] if name not in PLAIN] for rows in runs if rows] or [[""]]
        metrics = [name for name in known[0] if all(name in one for one in known)]
        lasts = {seed: rows[-1] for seed, rows in zip(seeds, runs, strict=True) if rows}
        curves = {metric: Curve.of(runs, metric) for metric in metrics}
        alive = next(iter(curves.values())).alive()
        if alive:  # as far as all seeds are that are still alive
            common = min(lasts[seeds[n]]["round"] for n in alive)
            curves = {name: curve.until(common) for name, curve in curves.items()}
        far = {seed: last["round"] for seed, last in lasts.items() if not last.get("diverged")}
        unfinished = {seed: t for seed, t in far.items() if t < spec["rounds"]}
        return Series(label, color, spec, tuple(seeds), curves, unfinished)

    @property
    def metrics(self) -> list[str]:
        return [name for name in self.curves if name]

    def curve(self, metric: str) -> Curve:
        """The curve of a metric, as far as all seeds are that are still alive."""
        found = self.curves.get(metric, self.curves.get(""))
        if found is None:
            raise SpecError(
                f"{self.label!r} has no metric {metric!r}; it has {', '.join(self.curves)}"
            )
        return found

    def thin(self, points: int = POINTS) -> Series:
        """The series with as many rows as a chart can show: even on a linear axis and on a logarithmic one."""
        rows = len(next(iter(self.curves.values())).rounds)
        even = np.linspace(0, rows - 1, min(rows, points))
        growing = np.geomspace(1, max(rows - 1, 1), min(rows, points)).clip(0, rows - 1)
        keep = np.unique(np.concatenate([even, growing]).astype(np.int64))
        curves = {name: curve.at_rows(keep) for name, curve in self.curves.items()}
        return replace(self, curves=curves)

    def to_json(self) -> Table:
        """Plain values, rounded to six digits; label and color are kept elsewhere."""
        one = next(iter(self.curves.values()))
        spent = {name: rounded(getattr(one, name)) for name in SPENT}
        values = {name: [rounded(v) for v in curve.values] for name, curve in self.curves.items()}
        ends = {"diverged": one.diverged, "failed": one.failed}
        return {"spec": self.spec, "seeds": list(self.seeds)} | spent | ends | {"metrics": values}

    @staticmethod
    def from_json(table: Table, label: str, color: str) -> Series:
        """What `to_json` wrote."""
        plain: Table = {name: np.array(table[name], float) for name in SPENT}
        plain |= {"diverged": table["diverged"], "failed": table["failed"]}
        curves = {
            name: Curve(values=np.array(values, float), **plain)
            for name, values in table["metrics"].items()
        }
        return Series(label, color, table["spec"], tuple(table["seeds"]), curves)


def find(places: Sequence[Path]) -> list[tuple[str, list[Series]]]:
    """All runs below some directories: what sets a task apart, and the series on it. Seeds of a spec are one series."""
    groups: dict[str, dict[int, tuple[Table, list[Line], Table]]] = {}  # identity → seed → run
    for place in places:
        files = sorted(place.rglob(history.NAME)) if place.is_dir() else [place]
        homes = {file: _run_dir(file.parent) for file in files}
        for run_dir in dict.fromkeys(homes.values()):
            folders = [file.parent for file in sorted(run_dir.glob(f"seed-*/{history.NAME}"))]
            check_run(run_dir, [run_dir] if (run_dir / history.NAME).exists() else folders)
        found = [(file, *history.read(file)) for file in files]
        for file, header, _ in found:
            if not {"method", "rounds", "seed"} <= header["spec"].keys():
                raise CheckpointError(
                    f"line 1 of {str(file)!r} has no spec with a method, rounds and a seed; run it again"
                )
        if not any(rows for *_, rows in found):
            raise CheckpointError(
                f"{str(place)!r} holds no {history.NAME} with rows; give the directory of a run"
            )
        for file, header, rows in found:
            spec = header["spec"]
            try:
                identity = Spec.from_table(spec).identity()
            except FedspanError:  # it names things which are not registered here
                alike = {k: v for k, v in spec.items() if k not in ("rounds", "seed")}
                identity = json.dumps(alike)
            seeds = groups.setdefault(identity, {})
            if rows and len(rows) > len(seeds.get(spec["seed"], ({}, [], {}))[1]):
                seeds[spec["seed"]] = spec, rows, recorded(homes[file], header)
    tasks: dict[str, list[dict[int, tuple[Table, list[Line], Table]]]] = {}
    for group in filter(None, groups.values()):
        spec = next(iter(group.values()))[0]
        own = {k: spec[k] for k in ("model", "data") if k in spec}  # of a run of `fit`: sizes only
        task = json.dumps(spec.get("task", own), sort_keys=True)
        tasks.setdefault(task, []).append(dict(sorted(group.items())))
    out = []
    for title, some in zip(
        _different([flat(json.loads(t)) for t in tasks]), tasks.values(), strict=True
    ):
        firsts = [next(iter(seeds.values())) for seeds in some]
        series = []
        names = labels([spec for spec, *_ in firsts])
        for label, (spec, _, costs), seeds in zip(names, firsts, some, strict=True):
            made = Series.of(label, "", spec, tuple(seeds), [rows for _, rows, _ in seeds.values()])
            series.append(replace(made, costs=costs))
        out.append((title or "Runs", series))
    return out


def _run_dir(folder: Path) -> Path:
    """The directory of the run to which a history belongs; seeds share the one above theirs."""
    one_of_several = folder.name.startswith("seed-") and (folder.parent / OUTCOME).exists()
    return folder.parent if one_of_several else folder


def memory_file(run_dir: Path) -> Path:
    """Beside a run of a study: the memory of its clients."""
    return run_dir.with_name(f"{run_dir.name}.json")


def recorded(run_dir: Path, header: Line) -> Table:
    """The costs that a run has recorded in its history, and a study beside it; fewer of an earlier version."""
    path = memory_file(run_dir)
    found = check_form(header.get("costs", {}), run_dir, {}, RECORDED)
    found |= read_table(path, more=RECORDED) if path.exists() else {}
    return {key: found[key] for key in RECORDED if key in found}


def labels(specs: Sequence[Table]) -> list[str]:
    """The method of each spec, with the settings in which it differs from others of that method."""
    out = [""] * len(specs)
    plain = [flat({k: v for k, v in one.items() if k not in ("rounds", "seed")}) for one in specs]
    for name in dict.fromkeys(spec["method"]["name"] for spec in specs):
        places = [n for n, spec in enumerate(specs) if spec["method"]["name"] == name]
        for place, text in zip(places, _different([plain[n] for n in places]), strict=True):
            out[place] = f"{name}, {text}" if text else name
    return out


def _different(tables: Sequence[Table]) -> list[str]:
    """Of each table the values in which it differs from the others."""
    keys = dict.fromkeys(key for table in tables for key in table)
    differing = [k for k in keys if len({json.dumps(table.get(k)) for table in tables}) > 1]
    return [", ".join(setting(k, t[k]) for k in differing if k in t) for t in tables]


def setting(key: str, value: Any) -> str:
    """method.space.rank = 20 → rank 20, method.server.lr = 1.0 → server lr 1; a name stands for itself."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    last = key.rpartition(".")[2]
    if key.endswith("server.lr"):  # beside that of the local steps
        last = "server lr"
    return text if last == "name" else f"{last} {text}"


# ---- the Pareto front: the evaluations that no other run beats for the same cost or less


def pareto(
    series: Sequence[Series], metric: str, goal: Goal, axis: Axis
) -> list[tuple[int, float, float]]:
    """(number of a series, cost, value) of the Pareto-optimal rows, from the cheapest to the most expensive.

    Every row is a place to stop, so the front shows which method to take for a number of bytes, whatever the length of
    the runs. Between two rows a run is interpolated linearly. A row counts only if all its seeds have
    it; rows that cost nothing are left out.
    """
    sign = 1 if goal == "max" else -1
    lines = []
    for one in series:
        curve = one.curve(metric)
        worth = sign * curve.values.mean(0)
        there = np.isfinite(worth)
        lines.append((curve.spent(axis)[there], worth[there]))
    costs = np.unique(np.concatenate([cost for cost, _ in lines]))
    best, out = -np.inf, []
    for cost in costs[costs > 0].tolist():
        values = [
            float(np.interp(cost, at, worth)) if len(at) and at[0] <= cost <= at[-1] else -np.inf
            for at, worth in lines
        ]
        place = int(np.argmax(values))
        if values[place] > best:
            best = values[place]
            if cost in lines[place][0]:
                out.append((place, cost, sign * best))
    return out


def reach(
    series: Sequence[Series], metric: str, goal: Goal, axis: Axis
) -> dict[int, tuple[float, float]]:
    """Number of a series → (cheapest, most expensive) of its Pareto-optimal rows."""
    out: dict[int, tuple[float, float]] = {}
    for number, cost, _ in pareto(series, metric, goal, axis):
        out[number] = out.get(number, (cost, cost))[0], cost
    return out
