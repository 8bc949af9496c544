"""Histories as series over seeds, runs found in directories, and the Pareto front of several series."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fedspan.core.errors import CheckpointError, FedspanError, SpecError
from fedspan.core.json_log import check_form, read_table
from fedspan.core.spec import Spec, flat
from fedspan.engine import history
from fedspan.engine.history import PLAIN
from fedspan.engine.loop import Line
from fedspan.engine.provenance import OUTCOME, check_run

RECORDED = {
    "client_state": int, "client_memory": int, "test_examples": int, "projected": list[int],
    "clients_per_round": int, "local_steps": int,
}  # fmt: skip
POINTS = 120  # rows of a curve that are kept
Table = dict[str, Any]
Run = tuple[Table, list[Line], Table]  # spec, rows, and the costs that it has recorded
Floats = npt.NDArray[np.float64]
Goal = Literal["max", "min"]
Axis = Literal["round", "up", "total", "seconds", "hours"]
AXES: dict[Axis, str] = {  # titles, in which {} is the unit of bytes
    "round": "round",
    "up": "{} sent up, all clients",
    "total": "{} sent, both directions, all clients",
    "seconds": "seconds of training",
    "hours": "hours",
}
BYTES: tuple[Axis, ...] = ("up", "total")
# key in a file
SAVED = {"rounds": "round", "up": "up", "down": "down", "seconds": "seconds", "hours": "hours"}


class Tail(NamedTuple):
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


@dataclass(frozen=True, eq=False)
class Series:
    """The runs of one spec under all its seeds: a line of a chart, a row of a table.

    Attributes:
        label: Its name.
        color: Empty: chosen when it is drawn.
        spec: The resolved spec.
        seeds: The seeds.
        spent: What was spent up to each row, mean over seeds: for every axis, and for "down"; hours are nan without a
            virtual clock. "up_most" and
            "total_most" are those of the seed that has sent most, if known.
        metrics: Name → (seeds, rows). Rows that a seed does not have, or has after diverging, are nan. Empty if all
            seeds failed.
        diverged: The round at which each seed diverged, or None.
        failed: Whether each seed failed.
        unfinished: Seed → its last round, if it can go on.
        costs: What the runs have recorded.
        metric: The metric by which the series is read: that of `values` and of results.
    """

    label: str
    color: str
    spec: Table
    seeds: tuple[int, ...]
    spent: dict[str, Floats]
    metrics: dict[str, Floats]
    diverged: list[int | None]
    failed: list[bool]
    unfinished: dict[int, int] = field(default_factory=dict)
    costs: Table = field(default_factory=dict)
    metric: str = ""

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

        A seed that failed has no rows. Only rounds count that all seeds have which got so far: a run that was extended
        has a row at its old end. What was spent never falls when a seed drops out.
        """
        lasts = [rows[-1] if rows else {} for rows in runs]
        gone = [last["round"] if last.get("diverged") else None for last in lasts]
        pairs = zip(seeds, lasts, gone, strict=True)
        far = {seed: last["round"] for seed, last, t in pairs if last and t is None}
        end = min(far.values(), default=math.inf)
        by_round = [{row["round"]: row for row in rows} for rows in runs]
        rounds = [
            t
            for t in sorted(set[int]().union(*by_round))
            if t <= end and all(t in rows or max(rows, default=-1) < t for rows in by_round)
        ]
        if not rounds:
            zero = {"round": 0, "up_bytes": 0, "down_bytes": 0, "seconds": 0.0}
            rounds, by_round = [0], [{0: zero}]

        def column(key: str, whose: list[dict[int, Line]]) -> Floats:
            return np.array([[rows.get(t, {}).get(key) for t in rounds] for rows in whose], float)

        costs_of = {axis: column(f"{axis}_bytes", by_round) for axis in ("up", "down")}
        costs_of["total"] = costs_of["up"] + costs_of["down"]
        costs_of |= {axis: column(axis, by_round) for axis in ("round", "seconds", "hours")}
        spent = {}
        for axis, values in costs_of.items():
            mean, _, most = over_seeds(values)
            spent[axis] = np.maximum.accumulate(mean)
            spent[f"{axis}_most"] = np.maximum.accumulate(most)
        alive = [{t: row for t, row in one.items() if not row.get("diverged")} for one in by_round]
        first = [rows[0] for rows in runs if rows]
        names = [key for key in first[0] if all(key in row for row in first)] if first else []
        metrics = {name: column(name, alive) for name in names if name not in PLAIN}
        failed = [not rows for rows in runs]
        unfinished = {seed: t for seed, t in far.items() if t < spec["rounds"]}
        found = Series(
            label, color, spec, tuple(seeds), spent, metrics, gone, failed, unfinished, costs or {}
        )
        return found.until(end)

    def curve(self, metric: str) -> Series:
        """Return the series as it is read by a metric."""
        if self.metrics and metric not in self.metrics:
            raise SpecError(
                f"{self.label!r} has no metric {metric!r}; it has {', '.join(self.metrics)}"
            )
        return replace(self, metric=metric)

    @property
    def values(self) -> Floats:
        """The metric, (seeds, rows)."""
        nothing = np.full((len(self.seeds), len(self.rounds)), math.nan)
        return self.metrics.get(self.metric, nothing)

    @property
    def rounds(self) -> Floats:
        """The round of each row."""
        return self.spent["round"]

    def most(self, axis: Axis) -> Floats:
        """Return what any seed has spent at most up to each row."""
        return self.spent.get(f"{axis}_most", self.spent[axis])

    def until(self, rounds: float) -> Series:
        """Return the rows up to a round; a seed that diverged later has not diverged here."""
        diverged = [t if t is not None and t <= rounds else None for t in self.diverged]
        return replace(self.at_rows(self.rounds <= rounds), diverged=diverged)

    def within(self, limits: dict[Axis, float]) -> Series:
        """Return the rows at which every seed has spent no more than some limits; at least the first."""
        rows = [np.searchsorted(self.most(a), limits[a], side="right") for a in limits]
        return self.until(self.rounds[max(int(min(rows)), 1) - 1]) if rows else self

    def at_rows(self, rows: npt.NDArray[Any]) -> Series:
        """Return some of the rows."""
        spent = {axis: known[rows] for axis, known in self.spent.items()}
        metrics = {name: values[:, rows] for name, values in self.metrics.items()}
        return replace(self, spent=spent, metrics=metrics)

    def thin(self, points: int = POINTS) -> Series:
        """Return as many rows as a chart can show: even on a linear axis and on a logarithmic one."""
        rows = len(self.rounds)
        even = np.linspace(0, rows - 1, min(rows, points))
        growing = np.geomspace(1, max(rows - 1, 1), min(rows, points)).clip(0, rows - 1)
        return self.at_rows(np.unique(np.concatenate([even, growing]).astype(np.int64)))

    def alive(self) -> list[int]:
        """Return the seeds that neither diverged nor failed."""
        return [n for n, t in enumerate(self.diverged) if t is None and not self.failed[n]]

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
        if not tops:
            return self._over_seeds(np.full(len(self.alive()), np.nan))
        return self._over_seeds(np.array(tops))._replace(diverged=0)

    def _over_seeds(self, values: Floats) -> Tail:
        known, seeds = values[np.isfinite(values)], len(self.diverged)
        mean = float(known.mean()) if len(known) else math.nan
        spread = float(known.std(ddof=1)) if len(known) > 1 else math.nan
        gone, failed = sum(t is not None for t in self.diverged), sum(self.failed)
        undefined = len(values) - len(known) if gone + failed < seeds else 0
        return Tail(mean, spread, gone, seeds, failed, undefined)

    def to_json(self) -> Table:
        """Return plain values, rounded to six digits; label and color are kept elsewhere."""
        spent = {key: rounded(self.spent[axis]) for key, axis in SAVED.items()}
        if None in spent["hours"]:
            del spent["hours"]
        values = {name: [rounded(v) for v in seeds] for name, seeds in self.metrics.items()}
        ends = {"diverged": self.diverged, "failed": self.failed}
        return {"spec": self.spec, "seeds": list(self.seeds)} | spent | ends | {"metrics": values}

    @staticmethod
    def from_json(table: Table, label: str, color: str) -> Series:
        """Return the series that `to_json` wrote."""
        none = [math.nan] * len(table["rounds"])
        spent = {axis: np.array(table.get(key, none), float) for key, axis in SAVED.items()}
        spent["total"] = spent["up"] + spent["down"]
        metrics = {name: np.array(values, float) for name, values in table["metrics"].items()}
        spec, seeds, *ends = (table[key] for key in ("spec", "seeds", "diverged", "failed"))
        return Series(label, color, spec, tuple(seeds), spent, metrics, *ends)


def over_seeds(values: Floats) -> tuple[Floats, Floats, Floats]:
    """Return mean, lowest and highest over the seeds that have a row; nan if none has."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # rows in which every seed has diverged
        return np.nanmean(values, 0), np.nanmin(values, 0), np.nanmax(values, 0)


def rounded(values: Iterable[float], digits: int = 6) -> list[float | int | None]:
    """Return numbers with so many digits for JSON; what is not finite is null."""
    short = [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values]
    return [int(value) if value is not None and value.is_integer() else value for value in short]


def find(places: Sequence[Path]) -> list[tuple[str, list[Series]]]:
    """Return all runs below some directories: what sets a task apart, and the series on it.

    Seeds of a spec are one series.
    """
    tasks: dict[str, dict[str, dict[int, Run]]] = {}  # task → identity → seed → run
    for place in places:
        homes: dict[Path, list[Path]] = {}  # directory of a run → histories
        for file in sorted(place.rglob(history.NAME)) if place.is_dir() else [place]:
            home = file.parent
            if home.name.startswith("seed-") and (home.parent / OUTCOME).exists():
                home = home.parent  # which its seeds share
            homes.setdefault(home, []).append(file)
        empty = True
        for home, files in homes.items():
            check_run(home, [file.parent for file in files])
            for file in files:
                header, rows = history.read(file)
                spec = header["spec"]
                if not {"method", "rounds", "seed"} <= spec.keys():
                    raise CheckpointError(
                        f"line 1 of {str(file)!r} has no spec with a method, rounds and a seed; run it again"
                    )
                if not rows:
                    continue
                try:
                    identity = Spec.from_table(spec).identity()
                except FedspanError:  # it names things which are not registered here
                    identity = json.dumps(_alike(spec))
                sizes = {k: spec[k] for k in ("model", "data") if k in spec}  # of a run of `fit`
                task = json.dumps(spec.get("task", sizes), sort_keys=True)
                seeds, empty = tasks.setdefault(task, {}).setdefault(identity, {}), False
                if len(rows) > len(seeds.get(spec["seed"], ({}, []))[1]):
                    seeds[spec["seed"]] = spec, rows, recorded(home, header)
        if empty:
            raise CheckpointError(
                f"{str(place)!r} holds no {history.NAME} with rows; give the directory of a run"
            )
    out = []
    titles = _different([flat(json.loads(task)) for task in tasks])
    for title, groups in zip(titles, tasks.values(), strict=True):
        some = [dict(sorted(group.items())) for group in groups.values()]
        firsts = [next(iter(group.values())) for group in some]
        names = labels([spec for spec, *_ in firsts])
        series = [
            Series.of(label, "", spec, [*group], [rows for _, rows, _ in group.values()], costs)
            for label, (spec, _, costs), group in zip(names, firsts, some, strict=True)
        ]
        out.append((title or "Runs", series))
    return out


def memory_file(run_dir: Path) -> Path:
    """Return the file beside a run of a study with the memory of its clients."""
    return run_dir.with_name(f"{run_dir.name}.json")


def recorded(run_dir: Path, header: Line) -> Table:
    """Return the costs that a run has recorded in its history, and a study beside it; fewer of an earlier version."""
    path = memory_file(run_dir)
    found = check_form(header.get("costs", {}), run_dir, {}, RECORDED)
    found |= read_table(path, more=RECORDED) if path.exists() else {}
    return {key: found[key] for key in RECORDED if key in found}


def labels(specs: Sequence[Table]) -> list[str]:
    """Return the method of each spec, with the settings in which it differs from others of that method."""
    out = [spec["method"]["name"] for spec in specs]
    for name in set(out):
        places = [n for n, spec in enumerate(specs) if spec["method"]["name"] == name]
        texts = _different([flat(_alike(specs[n])) for n in places])
        for place, text in zip(places, texts, strict=True):
            out[place] += f", {text}" if text else ""
    return out


def _alike(spec: Table) -> Table:
    """Return what the runs of a series have in common."""
    return {key: value for key, value in spec.items() if key not in ("rounds", "seed")}


def _different(tables: Sequence[Table]) -> list[str]:
    """Return of each table the values in which it differs from the others."""
    keys = dict.fromkeys(key for table in tables for key in table)
    differing = [k for k in keys if len({json.dumps(table.get(k)) for table in tables}) > 1]
    return [", ".join(setting(k, t[k]) for k in differing if k in t) for t in tables]


def setting(key: str, value: Any) -> str:
    """Return method.space.rank = 20 → rank 20, method.server.lr = 1.0 → server lr 1; a name stands for itself."""
    last = key.rpartition(".")[2]
    if key.endswith("server.lr"):  # beside that of the local steps
        last = "server lr"
    return plain(value) if last == "name" else f"{last} {plain(value)}"


def plain(value: Any) -> str:
    """Return a value in words; numbers without zeros at the end."""
    return f"{value:g}" if isinstance(value, float) else str(value)


# ---- the Pareto front: the evaluations that no other run beats for the same cost or less


def pareto(
    series: Sequence[Series], metric: str, goal: Goal, axis: Axis
) -> list[tuple[int, float, float]]:
    """Return (number of a series, cost, value) of the Pareto-optimal rows, from the cheapest to the most expensive.

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
    costs = costs[costs > 0]
    worths = np.full((len(lines), len(costs)), -np.inf)
    for row, (at, worth) in zip(worths, lines, strict=True):
        if len(at):
            row[:] = np.interp(costs, at, worth, -np.inf, -np.inf)
    best, out = -np.inf, []
    for cost, place, top in zip(
        costs.tolist(), worths.argmax(0).tolist(), worths.max(0).tolist(), strict=True
    ):
        if top > best:
            best = top
            if cost in lines[place][0]:
                out.append((place, cost, sign * best))
    return out


def reach(
    series: Sequence[Series], metric: str, goal: Goal, axis: Axis
) -> dict[int, tuple[float, float]]:
    """Return number of a series → (cheapest, most expensive) of its Pareto-optimal rows."""
    out: dict[int, tuple[float, float]] = {}
    for number, cost, _ in pareto(series, metric, goal, axis):
        out[number] = out.get(number, (cost, cost))[0], cost
    return out
