"""The runs of a study: which jobs it needs, which point each variant takes, and the series they come to."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedspan.callbacks._event_log import kind_of
from fedspan.core.errors import CheckpointError
from fedspan.core.spec import Spec
from fedspan.engine import history
from fedspan.engine.provenance import LR, read_lr
from fedspan.study.curves import Axis, Curve, Tail
from fedspan.study.halving import hopeless, stages
from fedspan.study.jobs import Job, jobs_of
from fedspan.study.model import Part, Point, Row, Study, Variant, settings
from fedspan.study.series import Series

Cell = tuple[Part, Row, Variant]


@dataclass(frozen=True)
class Tried:
    """One point of a variant's grid, and its result in tuning."""

    point: Point
    rounds: int
    end: Tail  # in the metric that decides the tuning
    deciding: Curve | None = None  # the same metric over rounds; None: read from a data file
    curve: Curve | None = None  # the metric of the part
    dropped: bool = False  # far behind the best one, and not run to the end

    def spent(self, axis: Axis) -> float:
        """The most that it has spent."""
        return math.inf if self.deciding is None else float(self.deciding.most(axis)[-1])


class Runs:
    """Everything that is read from the runs of a study, in one directory; each series is read once."""

    def __init__(self, study: Study, place: Path) -> None:
        self.study, self.place = study, place
        self._tried: dict[tuple[str, int, str], list[Tried]] = {}
        self._series: dict[tuple[str, int, str], Series] = {}
        self._decided: dict[
            tuple[str, int, str], list[int]
        ] = {}  # rounds of each point, where no stage is left
        self._awaited: list[tuple[Cell, list[Job]]] = [
            (cell, []) for cell in self.cells()
        ]  # runs that cells wait for

    def cells(self) -> Iterator[Cell]:
        """Every variant in every row of every part."""
        return ((part, row, variant) for part in self.study.parts for row, variant in part.cells())

    # ---- jobs

    def tuning(self) -> list[Job]:
        """The runs that decide the points, as far as is known which of them are dropped."""
        return [job for cell in self.cells() for jobs in self.trying(cell) for job in jobs]

    def trying(self, cell: Cell) -> list[list[Job]]:
        """The runs that try each point of a grid, at the lengths that are known by now."""
        return [self._trial(cell, n, rounds) for n, rounds in enumerate(self._lengths(cell))]

    def _trial(self, cell: Cell, n: int, rounds: int) -> list[Job]:
        """The runs of a grid's n-th point."""
        part, row, variant = cell
        point = _candidates(*cell)[n]
        spec = dataclasses.replace(part.tuning_spec(variant, point, row), rounds=rounds)
        jobs = jobs_of(
            spec, self.place, part.tuning_seeds, f"tuning {variant.label}, {settings(point)}"
        )
        return [dataclasses.replace(job, keep=True) for job in jobs]  # a longer run may continue it

    def _lengths(self, cell: Cell) -> list[int]:
        """The rounds of each point of a grid: of its stage, or in the end all or those at which it was dropped."""
        if _key(cell) in self._decided:
            return self._decided[_key(cell)]
        specs = _specs(cell)
        lengths, left = [spec.rounds for spec in specs], set(range(len(specs)))
        for rounds, share, behind in stages(cell[0], cell[2], specs):
            jobs = {n: self._trial(cell, n, rounds[n]) for n in left}
            if not all(job.ended() for of_point in jobs.values() for job in of_point):
                return [rounds[n] if n in left else length for n, length in enumerate(lengths)]
            curves = {n: _read(cell[2], jobs[n]).curve(cell[0].tune_metric) for n in left}
            for n in hopeless(cell[0], curves, share, behind):
                lengths[n] = rounds[n]
                left.remove(n)
        self._decided[_key(cell)] = lengths
        return lengths

    def final(self) -> list[Job]:
        """All seeds of every variant at its point."""
        return [job for cell in self.cells() for job in self.running(cell)]

    def running(self, cell: Cell) -> list[Job]:
        """All seeds of a variant at its point."""
        return self._seeds(cell, self.point(cell))

    def _seeds(self, cell: Cell, point: Point) -> list[Job]:
        part, row, variant = cell
        return jobs_of(part.spec(variant, point, row), self.place, part.seeds, variant.label)

    def possible(self) -> list[Job]:
        """All runs that may be made, whatever the tuning chooses."""
        found = []
        for cell in self.cells():
            specs = _specs(cell)
            lengths = [
                [spec.rounds for spec in specs],
                *(one[0] for one in stages(cell[0], cell[2], specs)),
            ]
            found += [
                job
                for rounds in lengths
                for n, t in enumerate(rounds)
                for job in self._trial(cell, n, t)
            ]
            found += [job for point in cell[2].points() for job in self._seeds(cell, point)]
        return found

    def ready(self) -> list[Job]:
        """The runs that can begin now: those of the next stage of a tuning, or at the point that it chose."""
        waiting = [(cell, [job for job in jobs if not job.ended()]) for cell, jobs in self._awaited]
        self._awaited, found = [], list[Job]()
        for cell, jobs in waiting:
            if not jobs:
                trials = self.trying(self._source(cell))
                jobs = [job for of_point in trials for job in of_point if not job.ended()]
                found += jobs or self.running(cell)
            if jobs:
                self._awaited.append((cell, jobs))
        return found

    def jobs(self) -> list[Job]:
        """All runs of the study."""
        return self.tuning() + self.final()

    # ---- points

    def tried(self, cell: Cell) -> list[Tried]:
        """All points of a variant's grid; none if there was nothing to choose."""
        key = _key(cell)
        if key not in self._tried:
            tried = zip(_candidates(*cell), self.trying(cell), _specs(cell), strict=True)
            self._tried[key] = [self._try(cell, *one) for one in tried]
        return self._tried[key]

    def point(self, cell: Cell) -> Point:
        """The point that a variant takes: the best of its grid, or the one chosen in another part.

        A point at which any seed diverged or failed is the last to be taken.
        """
        part, _, variant = cell = self._source(cell)
        best = max(
            self.tried(cell), key=lambda one: (not one.dropped, rank(part, one.end)), default=None
        )
        return best.point if best is not None else variant.points()[0]

    def _source(self, cell: Cell) -> Cell:
        """The cell whose tuning decides the point of a cell: itself, or the one that its part names."""
        part, row, _ = cell
        if not part.tuned_in:
            return cell
        name, _, chosen = part.tuned_in.partition(".")
        other = self.study.part(name)
        same = next(r for r in other.rows if r.values.items() <= row.values.items())
        return self._source((other, same, other.variant(chosen)))

    def found_lr(self, cell: Cell) -> list[float]:
        """The step sizes that a variant with `lr = "search"` or "auto" found, in the order of its runs."""
        files = [job.run_dir / LR for job in self.running(cell)]
        return [read_lr(file)["values"]["lr"] for file in files if file.exists()]

    # ---- results

    def series(self, cell: Cell) -> Series:
        """All seeds of a variant at its point."""
        key = _key(cell)
        if key not in self._series:
            self._series[key] = _read(cell[2], self.running(cell))
        return self._series[key]

    def curve(self, cell: Cell) -> Curve:
        """The same in the metric of the part."""
        return self.series(cell).curve(cell[0].metric)

    def equal_cost(self, part: Part, row: Row, axis: Axis) -> float:
        """The most that every variant with a result has spent: rounds or bytes at which all can be compared."""
        curves = [self.curve((part, r, v)) for r, v in part.cells() if r is row]
        whole = [curve for curve in curves if curve.alive()]
        return min(float(curve.most(axis)[-1]) for curve in whole or curves)

    def at(self, cell: Cell, axis: Axis, cost: float) -> Tail:
        """The result at a cost."""
        return _at(cell[0], self.curve(cell), axis, cost)

    def tuned_at(self, cell: Cell, axis: Axis, cost: float) -> Tail:
        """The same at the point of the grid that is best there in tuning; on all seeds if that is the chosen one."""
        part = cell[0]
        there = [one for one in self.tried(cell) if not (one.dropped and one.spent(axis) < cost)]
        ends = [
            (one, _at(part, one.deciding, axis, cost)) for one in there if one.deciding is not None
        ]
        best, _ = max(ends, key=lambda pair: rank(part, pair[1]), default=(None, None))
        if best is None or best.curve is None or best.point == self.point(cell):
            return self.at(cell, axis, cost)
        return _at(part, best.curve, axis, cost)

    def reached(self, cell: Cell) -> list[float] | None:
        """[rounds, bytes up, bytes both ways] until the mean over seeds first reaches the row's target; None: never."""
        part, row, _ = cell
        assert row.target is not None
        curve = self.curve(cell)
        mean = curve.values.mean(0)
        there = np.flatnonzero(mean < row.target if part.goal == "min" else mean > row.target)
        return (
            [float(curve.spent(axis)[there[0]]) for axis in ("round", "up", "total")]
            if len(there)
            else None
        )

    def failures(self, cell: Cell) -> list[str]:
        """Runs of a variant that failed, and why."""
        chosen, found = self.point(cell), []
        for point, jobs in [
            *zip(_candidates(*cell), self.trying(cell), strict=True),
            (chosen, self.running(cell)),
        ]:
            name = ", ".join([cell[2].label, *([settings(point)] if point else [])])
            found += [f"{name}: {why}" for job in jobs if (why := job.failure())]
        return list(dict.fromkeys(found))

    def events(self, cell: Cell) -> list[str]:
        """What went wrong in the runs of a variant: per seed the first event of each kind, and how many there are."""
        found = []
        for job in self.running(cell):
            for number, file in enumerate(job.histories()):
                kinds: dict[str, list[str]] = {}
                for row in history.read(file)[1] if file.exists() else []:
                    for event in row.get("events", ()):
                        kinds.setdefault(kind_of(event), []).append(event)
                for first, *others in kinds.values():
                    more = f" ({1 + len(others):,} events or more)" if others else ""
                    found.append(f"seed {job.spec.seed + number}: {first}{more}")
        return found

    def _try(self, cell: Cell, point: Point, jobs: list[Job], whole: Spec) -> Tried:
        part, series, rounds = cell[0], _read(cell[2], jobs), jobs[0].spec.rounds
        deciding = series.curve(part.tune_metric)
        end, dropped = final(part, deciding), rounds < whole.rounds
        return Tried(point, rounds, end, deciding, series.curve(part.metric), dropped)


def rank(part: Part, end: Tail) -> float:
    """Of a result in tuning, the higher the better; one that not every seed reached comes last."""
    sign = 1 if part.tune_goal == "max" else -1
    return sign * end.mean if end.whole else -math.inf


def edges(variant: Variant, point: Point) -> Point:
    """The settings of a point that lie at an end of their grid, so that a better value may lie beyond it."""
    numbers = {
        k: v
        for k, v in variant.grid.items()
        if len(v) > 1 and all(isinstance(x, int | float) for x in v)
    }
    return {
        key: point[key]
        for key, values in numbers.items()
        if point.get(key) in (min(values), max(values))
    }


def within(part: Part, curve: Curve) -> Curve:
    """The rows that the budget allows; all if there is none."""
    return curve if part.budget is None else part.budget.within(curve)


def final(part: Part, curve: Curve) -> Tail:
    """The mean of the last evaluations within the budget."""
    curve = within(part, curve)
    return curve.tail(part.last(len(curve.rounds)))


def by_seed(part: Part, curve: Curve) -> list[float]:
    """The result of every seed, as in `final`; nan for one that diverged or failed."""
    curve = within(part, curve)
    ends, alive = curve.values[:, -part.last(len(curve.rounds)) :].mean(1), curve.alive()
    return [float(end) if n in alive else math.nan for n, end in enumerate(ends)]


def _at(part: Part, curve: Curve, axis: Axis, cost: float) -> Tail:
    rows = max(1, int(np.searchsorted(curve.most(axis), cost, side="right")))
    return curve.until(int(curve.rounds[rows - 1])).tail(part.last(rows))


def _key(cell: Cell) -> tuple[str, int, str]:
    part, row, variant = cell
    return part.name, next(n for n, one in enumerate(part.rows) if one is row), variant.name


def _candidates(part: Part, _row: Row, variant: Variant) -> list[Point]:
    """The points to try; none for a variant that has nothing to choose."""
    points = variant.points()
    return points if len(points) > 1 and not part.tuned_in else []


def _specs(cell: Cell) -> list[Spec]:
    """The specs of all points to try."""
    part, row, variant = cell
    return [part.tuning_spec(variant, point, row) for point in _candidates(*cell)]


def _read(variant: Variant, jobs: list[Job]) -> Series:
    """The runs of one point as a series, no longer than their jobs."""
    runs = []
    for job in jobs:
        for file in job.histories():
            if not file.exists() and job.failure() is None:
                raise CheckpointError(f"{str(file)!r} is missing; run the comparison again")
            rows = [] if job.failure() is not None else history.read(file)[1]
            runs.append(tuple(row for row in rows if row["round"] <= job.spec.rounds))
    seeds = tuple(seed for job in jobs for seed in range(job.spec.seed, job.spec.seed + job.seeds))
    return Series.of(variant.label, variant.color, jobs[0].spec.table(), seeds, runs)
