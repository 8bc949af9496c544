"""The tuner: which runs a study needs, which point of its grid each variant takes, and the series they come to.

A grid is searched by successive halving of what is hopeless: at a quarter and at half of their rounds, points are
dropped that are far behind the best one. Progress is how far the metric has come from its value before the first round.
A point is dropped if it has made less than a share of the best one's progress, and would not even be where that one is
now if it kept up its pace to the end. The first leaves room for small steps, which begin slowly and may end better; the
second for large ones, which may begin by going astray. Who is dropped follows from the curves alone, whatever order the
runs are made in.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import numpy as np

from fedspan.callbacks._event_log import kind_of
from fedspan.core.errors import CheckpointError
from fedspan.core.spec import Spec
from fedspan.engine import history
from fedspan.engine.outcome import LR, read_lr
from fedspan.study.curves import Axis, Curve, Floats, Series, Tail, recorded
from fedspan.study.jobs import Job, jobs_of
from fedspan.study.model import Case, Part, Point, Study, Variant, settings

STAGES = {0.25: 0.5, 0.5: 0.7}  # share of the rounds → share of the best one's progress
EVALUATIONS = 8  # of a whole run, below which stopping early is not worth it
Cell = tuple[Part, Case, Variant]
Key = tuple[str, int, str]
T = TypeVar("T")


@dataclass(frozen=True)
class Tried:
    """One point of a variant's grid, and its result in tuning."""

    point: Point
    rounds: int
    end: Tail  # in the metric that decides the tuning
    deciding: Curve | None = None  # the same metric over rounds; None: read from a data file
    curve: Curve | None = None  # the metric of the part
    dropped: bool = False  # far behind the best one, and not run to the end


class Runs:
    """Everything that is read from the runs of a study, in one directory; each series is read once."""

    def __init__(self, study: Study, place: Path) -> None:
        self.study, self.place = study, place
        self._known: dict[tuple[str, Key], object] = {}
        self._decided: dict[Key, list[int]] = {}  # rounds of each point, where no stage is left
        self._awaited: list[tuple[Cell, list[Job]]] = [(cell, []) for cell in self.cells()]

    def cells(self) -> Iterator[Cell]:
        """Every variant in every case of every part."""
        return ((part, row, variant) for part in self.study.parts for row, variant in part.cells())

    def _once(self, what: str, cell: Cell, make: Callable[[], T]) -> T:
        """What is known of a cell, made when it is first asked for."""
        if (what, _key(cell)) not in self._known:
            self._known[what, _key(cell)] = make()
        return cast(T, self._known[what, _key(cell)])

    # ---- jobs

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

    def tuning(self) -> list[Job]:
        """The runs that decide the points, as far as is known which of them are dropped."""
        return [job for cell in self.cells() for jobs in self.trying(cell) for job in jobs]

    def final(self) -> list[Job]:
        """All seeds of every variant at its point."""
        return [job for cell in self.cells() for job in self.running(cell)]

    def jobs(self) -> list[Job]:
        """All runs of the study."""
        return self.tuning() + self.final()

    def possible(self) -> list[Job]:
        """All runs that may be made, whatever the tuning chooses."""
        found = []
        for cell in self.cells():
            specs = [spec for _, spec in self._points(cell)]
            staged = [rounds for rounds, *_ in stages(cell[0], cell[2], specs)]
            lengths = [[spec.rounds for spec in specs], *staged]
            for rounds in lengths:
                found += [job for n, t in enumerate(rounds) for job in self._trial(cell, n, t)]
            found += [job for point in cell[2].points() for job in self._seeds(cell, point)]
        return found

    def trying(self, cell: Cell) -> list[list[Job]]:
        """The runs that try each point of a grid, at the lengths that are known by now."""
        return [self._trial(cell, n, rounds) for n, rounds in enumerate(self._lengths(cell))]

    def running(self, cell: Cell) -> list[Job]:
        """All seeds of a variant at its point."""
        return self._seeds(cell, self.point(cell))

    def _points(self, cell: Cell) -> list[tuple[Point, Spec]]:
        """The points to try with their specs; none for a variant that has nothing to choose."""
        part, row, variant = cell
        points = variant.points()
        points = points if len(points) > 1 and not part.tuned_in else []
        made = lambda: [(point, part.tuning_spec(variant, point, row)) for point in points]  # noqa: E731
        return self._once("points", cell, made)

    def _trial(self, cell: Cell, n: int, rounds: int) -> list[Job]:
        """The runs of a grid's n-th point; a longer run may continue them."""
        part, _, variant = cell
        point, spec = self._points(cell)[n]
        what = f"tuning {variant.label}, {settings(point)}"
        jobs = jobs_of(
            dataclasses.replace(spec, rounds=rounds), self.place, part.tuning_seeds, what
        )
        return [dataclasses.replace(job, keep=True) for job in jobs]

    def _seeds(self, cell: Cell, point: Point) -> list[Job]:
        part, row, variant = cell
        return jobs_of(part.spec(variant, point, row), self.place, part.seeds, variant.label)

    def _lengths(self, cell: Cell) -> list[int]:
        """The rounds of each point of a grid: of its stage, or in the end all or those at which it was dropped."""
        if _key(cell) in self._decided:
            return self._decided[_key(cell)]
        specs = [spec for _, spec in self._points(cell)]
        lengths, left = [spec.rounds for spec in specs], set(range(len(specs)))
        for rounds, share, behind in stages(cell[0], cell[2], specs):
            jobs = {n: self._trial(cell, n, rounds[n]) for n in left}
            if not all(job.ended() for of_point in jobs.values() for job in of_point):
                return [rounds[n] if n in left else t for n, t in enumerate(lengths)]
            curves = {n: _read(cell[2], jobs[n]).curve(cell[0].tune_metric) for n in left}
            for n in hopeless(cell[0], curves, share, behind):
                lengths[n] = rounds[n]
                left.remove(n)
        self._decided[_key(cell)] = lengths
        return lengths

    # ---- points

    def tried(self, cell: Cell) -> list[Tried]:
        """All points of a variant's grid; none if there was nothing to choose."""

        def read() -> list[Tried]:
            part, _, variant = cell
            found = []
            points = self._points(cell)
            for (point, whole), jobs in zip(points, self.trying(cell), strict=True):
                series, rounds = _read(variant, jobs), jobs[0].spec.rounds
                deciding, curve = series.curve(part.tune_metric), series.curve(part.metric)
                end, dropped = part.result(deciding), rounds < whole.rounds
                found.append(Tried(point, rounds, end, deciding, curve, dropped))
            return found

        return self._once("tried", cell, read)

    def point(self, cell: Cell) -> Point:
        """The point that a variant takes: the best of its grid, or the one chosen in another part.

        A point at which any seed diverged or failed is the last to be taken.
        """
        part, _, variant = cell = self._source(cell)
        tried = self.tried(cell)
        best = max(tried, key=lambda one: (not one.dropped, rank(part, one.end)), default=None)
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
        return self._once("series", cell, lambda: _read(cell[2], self.running(cell)))

    def curve(self, cell: Cell) -> Curve:
        """The same in the metric of the part."""
        return self.series(cell).curve(cell[0].metric)

    def equal_cost(self, part: Part, row: Case, axis: Axis) -> float:
        """The most that every variant with a result has spent: rounds or bytes at which all can be compared."""
        curves = [self.curve((part, r, v)) for r, v in part.cells() if r is row]
        whole = [curve for curve in curves if curve.alive()]
        return min(float(curve.most(axis)[-1]) for curve in whole or curves)

    def at(self, cell: Cell, axis: Axis, cost: float) -> Tail:
        """The result at a cost."""
        return _at(cell[0], self.curve(cell), axis, cost)

    def tuned_at(self, cell: Cell, axis: Axis, cost: float) -> Tail:
        """The same at the point of the grid that is best there in tuning; on all seeds if that is the chosen one."""
        part, best, most = cell[0], None, -math.inf
        for one in self.tried(cell):
            assert one.deciding is not None
            if one.dropped and float(one.deciding.most(axis)[-1]) < cost:
                continue
            here = rank(part, _at(part, one.deciding, axis, cost))
            if best is None or here > most:
                best, most = one, here
        if best is None or best.curve is None or best.point == self.point(cell):
            return self.at(cell, axis, cost)
        return _at(part, best.curve, axis, cost)

    def reached(self, cell: Cell) -> list[float] | None:
        """[rounds, bytes up, bytes both ways] until the mean over seeds first reaches the row's target; None: never."""
        part, row, _ = cell
        assert row.target is not None
        curve = self.curve(cell)
        there = np.flatnonzero(part.sign * (curve.values.mean(0) - row.target) > 0)
        axes: tuple[Axis, ...] = ("round", "up", "total")
        return [float(curve.spent(axis)[there[0]]) for axis in axes] if len(there) else None

    def failures(self, cell: Cell) -> list[str]:
        """Runs of a variant that failed, and why."""
        points = self._points(cell)
        trials = [(p, jobs) for (p, _), jobs in zip(points, self.trying(cell), strict=True)]
        found = []
        for point, jobs in [*trials, (self.point(cell), self.running(cell))]:
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


def _key(cell: Cell) -> Key:
    part, row, variant = cell
    return part.name, id(row), variant.name


def rank(part: Part, end: Tail) -> float:
    """Of a result in tuning, the higher the better; one that not every seed reached comes last."""
    return part.tune_sign * end.mean if end.whole else -math.inf


def edges(variant: Variant, point: Point) -> Point:
    """The settings of a point that lie at an end of their grid, so that a better value may lie beyond it."""
    found = {}
    for key, values in variant.grid.items():
        numbers = len(values) > 1 and all(isinstance(one, int | float) for one in values)
        if numbers and point.get(key) in (min(values), max(values)):
            found[key] = point[key]
    return found


def by_seed(part: Part, curve: Curve) -> list[float]:
    """The result of every seed, as in `Part.result`; nan for one that diverged or failed."""
    curve = part.inside(curve)
    ends, alive = curve.values[:, -part.last(len(curve.rounds)) :].mean(1), curve.alive()
    return [float(end) if n in alive else math.nan for n, end in enumerate(ends)]


def _at(part: Part, curve: Curve, axis: Axis, cost: float) -> Tail:
    curve = curve.within({axis: cost})
    return curve.tail(part.last(len(curve.rounds)))


def _read(variant: Variant, jobs: list[Job]) -> Series:
    """The runs of one point as a series, no longer than their jobs."""
    runs = []
    for job in jobs:
        failed = job.failure() is not None
        for file in job.histories():
            if not file.exists() and not failed:
                raise CheckpointError(f"{str(file)!r} is missing; run the comparison again")
            rows = [] if failed else history.read(file)[1]
            runs.append([row for row in rows if row["round"] <= job.spec.rounds])
    seeds = [seed for job in jobs for seed in range(job.spec.seed, job.spec.seed + job.seeds)]
    found = Series.of(variant.label, variant.color, jobs[0].spec.table(), seeds, runs)
    return dataclasses.replace(found, costs=recorded(jobs[0].run_dir))


# ---- successive halving


def stages(
    part: Part, variant: Variant, specs: Sequence[Spec]
) -> list[tuple[list[int], float, float]]:
    """(rounds of each point, share of the rounds, share of progress) of every stage.

    There are none, and all points run to the end, where there are few points or evaluations, where the whole grid is
    shown in a figure, and where the length of a run decides its numbers.
    """
    if len(specs) < 3 or not variant.grid.keys().isdisjoint(part.figure.get("x", ())):
        return []
    for spec in specs:
        few = spec.rounds < EVALUATIONS * spec.eval_every
        if few or spec.length_decides or isinstance(spec.method.lr, str):
            return []
    return [
        ([evaluated_round(spec.rounds, spec.eval_every, share) for spec in specs], share, behind)
        for share, behind in STAGES.items()
    ]


def evaluated_round(rounds: int, eval_every: int, share: float) -> int:
    """The last round with an evaluation in a share of the rounds."""
    return max(1, int(share * rounds / eval_every)) * eval_every


def hopeless(part: Part, curves: Mapping[int, Curve], share: float, behind: float) -> set[int]:
    """The points to drop, from their curves up to a share of the rounds. One that has diverged has ended anyway."""
    values = {n: _progress(part, curve) for n, curve in curves.items() if curve.tail(1).whole}
    best = max((float(made[-1]) for made in values.values()), default=0.0)
    late = {n: made for n, made in values.items() if made[-1] < behind * best}
    return {n for n, made in late.items() if _at_the_end(made, share) < best}


def _progress(part: Part, curve: Curve) -> Floats:
    """How much better the metric is than before the first round, at every evaluation; each is the mean of a few."""
    better = part.tune_sign * (curve.values - curve.values[:, :1]).mean(0)
    few = part.last(len(better))
    return np.array([better[max(0, n - few) : n].mean() for n in range(1, len(better) + 1)])


def _at_the_end(made: Floats, share: float) -> float:
    """The progress at the end of the run if the pace of the last third is kept up."""
    third = max(1, len(made) // 3)
    pace = (made[-1] - made[-1 - third]) / third
    return float(made[-1] + max(pace, 0.0) * (len(made) - 1) * (1 / share - 1))
