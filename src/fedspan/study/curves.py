"""Histories as curves over seeds, series of runs found in directories, and the Pareto front of several series.

A curve is one metric of one spec under all its seeds, with what was spent. A series has the curves of every metric: one
line of a chart, one row of a table.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Sequence
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
Table = dict[str, Any]
Run = tuple[Table, list[Line], Table]  # spec, rows, and the costs that it has recorded
Floats = npt.NDArray[np.float64]
Goal = Literal["max", "min"]
Axis = Literal["round", "up", "total", "seconds"]
AXES: dict[Axis, str] = {  # titles, in which {} is the unit of bytes
    "round": "round",
    "up": "{} sent up, all clients",
    "total": "{} sent, both directions, all clients",
    "seconds": "seconds of training",
}
BYTES: tuple[Axis, ...] = ("up", "total")
SAVED = {"rounds": "round", "up": "up", "down": "down", "seconds": "seconds"}  # key in a file


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
        """Return the result in words, with the mean and the spread as the caller writes them."""
        if sum(self.lost.values()) == self.seeds:
            return next(iter(self.lost))
        text = value if math.isnan(self.spread) else f"{value} ± {spread}"
        gone = ", ".join(f"{n} of {self.seeds} {word}" for word, n in self.lost.items())
        return f"{text} ({gone})" if gone else text


@dataclass(frozen=True)
class Curve:
    """One metric of one spec over all seeds; rows that a seed does not have, or has after diverging, are nan.

    Attributes:
        values: The metric, (seeds, rows).
        spent: What was spent up to each row, mean over seeds: for every axis, and for "down". "up_most" and
            "total_most" are those of the seed that has sent most, if known.
        diverged: The round at which each seed diverged, or None.
        failed: Whether each seed failed.
    """

    values: Floats
    spent: dict[str, Floats]
    diverged: list[int | None]
    failed: list[bool]

    @staticmethod
    def of(runs: Sequence[Sequence[Line]], metric: str) -> Curve:
        """Return the curve of one list of rows per seed; a seed that failed has none.

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
        rounds = rounds or [0]
        zero = {"up_bytes": 0, "down_bytes": 0, "seconds": 0.0}
        there = [[rows[t] for rows in by_round if t in rows] or [zero] for t in rounds]
        spent = {"round": np.array(rounds, float)}
        for axis, key in {"up": "up_bytes", "down": "down_bytes", "seconds": "seconds"}.items():
            spent[axis] = np.array([np.mean([row[key] for row in rows]) for rows in there])
            spent[axis] = np.maximum.accumulate(spent[axis])
        spent["total"] = spent["up"] + spent["down"]
        for axis, keys in {"up": ["up_bytes"], "total": ["up_bytes", "down_bytes"]}.items():
            most = [max(sum(row[key] for key in keys) for row in rows) for rows in there]
            spent[f"{axis}_most"] = np.maximum.accumulate(np.array(most, float))

        def value(row: Line) -> float:
            found = None if row.get("diverged") else row.get(metric)
            return math.nan if found is None else float(found)

        lasts = [rows[-1] if rows else {} for rows in runs]
        return Curve(
            values=np.array([[value(rows.get(t, {})) for t in rounds] for rows in by_round]),
            spent=spent,
            diverged=[last["round"] if last.get("diverged") else None for last in lasts],
            failed=[not rows for rows in runs],
        )

    @property
    def rounds(self) -> Floats:
        """The round of each row."""
        return self.spent["round"]

    def most(self, axis: Axis) -> Floats:
        """Return what any seed has spent at most up to each row."""
        return self.spent.get(f"{axis}_most", self.spent[axis])

    def until(self, rounds: int) -> Curve:
        """Return the rows up to a round; a seed that diverged later has not diverged here."""
        rows = int(np.searchsorted(self.rounds, rounds, side="right"))
        diverged = [t if t is not None and t <= rounds else None for t in self.diverged]
        return replace(self.at_rows(np.arange(rows)), diverged=diverged)

    def within(self, limits: dict[Axis, float]) -> Curve:
        """Return the rows at which every seed has spent no more than some limits; at least the first."""
        rows = [np.searchsorted(self.most(a), limits[a], side="right") for a in limits]
        return self.until(int(self.rounds[max(int(min(rows)), 1) - 1])) if rows else self

    def at_rows(self, rows: npt.NDArray[np.int64]) -> Curve:
        """Return some of the rows."""
        spent = {name: known[rows] for name, known in self.spent.items()}
        return replace(self, values=self.values[:, rows], spent=spent)

    def alive(self) -> list[int]:
        """Return the seeds that neither diverged nor failed."""
        gone = zip(self.diverged, self.failed, strict=True)
        return [n for n, (t, lost) in enumerate(gone) if t is None and not lost]

    def ends(self, last: int) -> Floats:
        """Return the mean over the last evaluations, for each seed that is alive; nan if none is."""
        alive = self.alive()
        return self.values[alive, -last:].mean(1) if alive else np.array([np.nan])

    def tail(self, last: int) -> Tail:
        """Return the same over seeds."""
        return self._over_seeds(self.ends(last))

    def best(self, goal: Goal) -> Tail:
        """Return the best evaluation of each seed over seeds, including those that diverged later."""
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
    """Return mean, lowest and highest over the seeds that have a row; nan if none has."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # rows in which every seed has diverged
        return np.nanmean(values, 0), np.nanmin(values, 0), np.nanmax(values, 0)


def rounded(values: Iterable[float], digits: int = 6) -> list[float | int | None]:
    """Return numbers with so many digits for JSON; what is not finite is null."""
    short = [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values]
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
        label: str,
        color: str,
        spec: Table,
        seeds: Sequence[int],
        runs: Sequence[Sequence[Line]],
        costs: Table | None = None,
    ) -> Series:
        """Return the series of the rows of every seed, as far as all are that are still alive.

        A seed that failed has no rows.
        """
        known = [[name for name in rows[0] if name not in PLAIN] for rows in runs if rows] or [[""]]
        metrics = [name for name in known[0] if all(name in one for one in known)]
        curves = {metric: Curve.of(runs, metric) for metric in metrics}
        lasts = {seed: rows[-1] for seed, rows in zip(seeds, runs, strict=True) if rows}
        far = {seed: last["round"] for seed, last in lasts.items() if not last.get("diverged")}
        if far:
            curves = {name: curve.until(min(far.values())) for name, curve in curves.items()}
        unfinished = {seed: t for seed, t in far.items() if t < spec["rounds"]}
        return Series(label, color, spec, tuple(seeds), curves, unfinished, costs or {})

    @property
    def metrics(self) -> list[str]:
        return [name for name in self.curves if name]

    def curve(self, metric: str) -> Curve:
        """Return the curve of a metric."""
        found = self.curves.get(metric, self.curves.get(""))
        if found is None:
            raise SpecError(
                f"{self.label!r} has no metric {metric!r}; it has {', '.join(self.curves)}"
            )
        return found

    def thin(self, points: int = POINTS) -> Series:
        """Return as many rows as a chart can show: even on a linear axis and on a logarithmic one."""
        rows = len(next(iter(self.curves.values())).rounds)
        even = np.linspace(0, rows - 1, min(rows, points))
        growing = np.geomspace(1, max(rows - 1, 1), min(rows, points)).clip(0, rows - 1)
        keep = np.unique(np.concatenate([even, growing]).astype(np.int64))
        curves = {name: curve.at_rows(keep) for name, curve in self.curves.items()}
        return replace(self, curves=curves)

    def to_json(self) -> Table:
        """Return plain values, rounded to six digits; label and color are kept elsewhere."""
        one = next(iter(self.curves.values()))
        spent = {key: rounded(one.spent[axis]) for key, axis in SAVED.items()}
        values = {name: [rounded(v) for v in curve.values] for name, curve in self.curves.items()}
        ends = {"diverged": one.diverged, "failed": one.failed}
        return {"spec": self.spec, "seeds": list(self.seeds)} | spent | ends | {"metrics": values}

    @staticmethod
    def from_json(table: Table, label: str, color: str) -> Series:
        """Return the series that `to_json` wrote."""
        spent = {axis: np.array(table[key], float) for key, axis in SAVED.items()}
        spent["total"] = spent["up"] + spent["down"]
        curves = {
            name: Curve(np.array(values, float), spent, table["diverged"], table["failed"])
            for name, values in table["metrics"].items()
        }
        return Series(label, color, table["spec"], tuple(table["seeds"]), curves)


def find(places: Sequence[Path]) -> list[tuple[str, list[Series]]]:
    """Return all runs below some directories: what sets a task apart, and the series on it.

    Seeds of a spec are one series.
    """
    groups: dict[str, dict[int, Run]] = {}  # identity → seed → run
    for place in places:
        files = sorted(place.rglob(history.NAME)) if place.is_dir() else [place]
        homes = {file: _run_dir(file.parent) for file in files}
        for run_dir in dict.fromkeys(homes.values()):
            folders = [file.parent for file in sorted(run_dir.glob(f"seed-*/{history.NAME}"))]
            check_run(run_dir, [run_dir] if (run_dir / history.NAME).exists() else folders)
        empty = True
        for file, home in homes.items():
            header, rows = history.read(file)
            spec, empty = header["spec"], empty and not rows
            if not {"method", "rounds", "seed"} <= spec.keys():
                raise CheckpointError(
                    f"line 1 of {str(file)!r} has no spec with a method, rounds and a seed; run it again"
                )
            try:
                identity = Spec.from_table(spec).identity()
            except FedspanError:  # it names things which are not registered here
                alike = {k: v for k, v in spec.items() if k not in ("rounds", "seed")}
                identity = json.dumps(alike)
            seeds = groups.setdefault(identity, {})
            if len(rows) > len(seeds.get(spec["seed"], ({}, []))[1]):
                seeds[spec["seed"]] = spec, rows, recorded(home, header)
        if empty:
            raise CheckpointError(
                f"{str(place)!r} holds no {history.NAME} with rows; give the directory of a run"
            )
    tasks: dict[str, list[dict[int, Run]]] = {}
    for group in filter(None, groups.values()):
        spec = next(iter(group.values()))[0]
        own = {k: spec[k] for k in ("model", "data") if k in spec}  # of a run of `fit`: sizes only
        task = json.dumps(spec.get("task", own), sort_keys=True)
        tasks.setdefault(task, []).append(dict(sorted(group.items())))
    out = []
    titles = _different([flat(json.loads(task)) for task in tasks])
    for title, some in zip(titles, tasks.values(), strict=True):
        series, firsts = [], [next(iter(group.values())) for group in some]
        names = labels([spec for spec, *_ in firsts])
        for label, (spec, _, costs), group in zip(names, firsts, some, strict=True):
            runs = [rows for _, rows, _ in group.values()]
            series.append(Series.of(label, "", spec, tuple(group), runs, costs))
        out.append((title or "Runs", series))
    return out


def _run_dir(folder: Path) -> Path:
    """The directory of the run to which a history belongs; seeds of one computation share the one above theirs."""
    shared = folder.name.startswith("seed-") and not (folder / OUTCOME).exists()
    return folder.parent if shared and (folder.parent / OUTCOME).exists() else folder


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
        lines.append((curve.spent[axis][there], worth[there]))
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
