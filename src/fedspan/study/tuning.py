"""Which runs a study needs, which point of its grid each variant takes, and the series they come to.

The grid of a variant is tuned by successive halving (`fedspan.engine.tuner`): what is dropped, and what is chosen,
follows from the curves alone, whatever order the runs are made in.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from fedspan.callbacks._event_log import kind_of
from fedspan.core.errors import CheckpointError, SpecError
from fedspan.core.spec import Spec
from fedspan.engine import history
from fedspan.engine.loop import Line
from fedspan.engine.provenance import LR, read_lr
from fedspan.engine.tuner import STAGES, Floats, halve, stage_end
from fedspan.study.curves import Axis, Series, Table, Tail, recorded
from fedspan.study.jobs import Job, jobs_of
from fedspan.study.model import Case, Part, Point, Study, Variant, settings

EVALUATIONS = 8  # of a whole run, below which stopping early is not worth it


@dataclass(frozen=True)
class Tried:
    """One point of a variant's grid, and its result in tuning."""

    point: Point
    rounds: int
    end: Tail  # in the metric that decides the tuning
    dropped: bool = False  # far behind the best one, and not run to the end


class Cell:
    """A variant in one case of a part: the runs of its tuning and at its point, and what they come to.

    Its runs are in `runs.place`. What is read from them is read once.
    """

    def __init__(self, runs: Runs, part: Part, row: Case, variant: Variant) -> None:
        self.runs, self.part, self.row, self.variant = runs, part, row, variant
        self._decided: list[int] | None = None  # rounds of each point, where no stage is left
        self.awaited: list[Job] | None = []  # the runs of its stage; None: its point is chosen

    @cached_property
    def source(self) -> Cell:
        """The cell whose tuning decides the point of this one: itself, or the one that its part names."""
        if not self.part.tuned_in:
            return self
        values = self.row.values.items()
        for one in self.runs.cells:
            named = f"{one.part.name}.{one.variant.name}" == self.part.tuned_in
            if named and one.row.values.items() <= values:
                return one.source
        raise SpecError(
            f"`tuned_in` {self.part.tuned_in!r} of [parts.{self.part.name}] is no variant of a part in the same case"
        )

    # ---- jobs

    @cached_property
    def specs(self) -> list[tuple[Point, Spec]]:
        """The points to try with their specs; none for a variant that has nothing to choose."""
        points = self.variant.points()
        if len(points) == 1 or self.part.tuned_in:
            return []
        return [(point, self.part.tuning_spec(self.variant, point, self.row)) for point in points]

    @cached_property
    def stages(self) -> dict[float, float]:
        """The stages at which points may be dropped.

        There are none, and all points run to the end, where there are few points or evaluations, where the whole grid
        is shown in a figure, and where the length of a run decides its numbers.
        """
        shown = self.variant.grid.keys() & set(self.part.figure.get("x", ()))
        whole = (
            len(self.specs) < 3
            or shown
            or any(
                spec.rounds < EVALUATIONS * spec.eval_every
                or spec.length_decides
                or isinstance(spec.method.lr, str)
                for _, spec in self.specs
            )
        )
        return {} if whole else STAGES

    def trial(self, n: int, rounds: int) -> list[Job]:
        """The runs of the n-th point; a longer run may continue them."""
        spec = dataclasses.replace(self.specs[n][1], rounds=rounds)
        return jobs_of(spec, self.runs.place, self.part.tuning_seeds, keep=True)

    def trying(self) -> list[list[Job]]:
        """The runs that try each point, at the lengths that are known by now."""
        return [self.trial(n, rounds) for n, rounds in enumerate(self._lengths())]

    def _lengths(self) -> list[int]:
        """The rounds of each point: of its stage, or in the end all or those at which it was dropped."""
        if self._decided is not None:
            return self._decided
        pending = False

        def values(n: int, rounds: int) -> Floats | None:
            nonlocal pending
            jobs = self.trial(n, rounds)
            if all(job.ended() for job in jobs):
                return -self.part.tune_sign * self._read(jobs).curve(self.part.tune_metric).values
            pending = True
            return None

        lengths = [spec.rounds for _, spec in self.specs]
        every = [spec.eval_every for _, spec in self.specs]
        found = halve(lengths, every, values, self.part.last, self.stages)
        self._decided = None if pending else found
        return found

    def running(self, point: Point | None = None) -> list[Job]:
        """All seeds at a point, by default the chosen one."""
        spec = self.part.spec(self.variant, self.point if point is None else point, self.row)
        return jobs_of(spec, self.runs.place, self.part.seeds)

    def _read(self, jobs: list[Job]) -> Series:
        """The runs of one point as a series, no longer than their jobs."""
        rows: list[list[Line]] = []
        costs: Table = {}
        for job in jobs:
            failed = job.failure() is not None
            for file in job.histories():
                if not file.exists() and not failed:
                    raise CheckpointError(f"{str(file)!r} is missing; run the comparison again")
                header, known = ({}, []) if failed else history.read(file)
                rows.append([row for row in known if row["round"] <= job.spec.rounds])
                costs = costs or recorded(job.run_dir, header)
        seeds = [job.spec.seed + n for job in jobs for n in range(job.seeds)]
        spec = jobs[0].spec.table()
        return Series.of(self.variant.label, self.variant.color, spec, seeds, rows, costs)

    # ---- points

    @cached_property
    def tried(self) -> list[Tried]:
        """All points of the grid; none if there was nothing to choose."""
        found = []
        for (point, whole), jobs in zip(self.specs, self.trying(), strict=True):
            series, rounds = self._read(jobs), jobs[0].spec.rounds
            end = self.part.result(series.curve(self.part.tune_metric))
            found.append(Tried(point, rounds, end, rounds < whole.rounds))
        return found

    @property
    def point(self) -> Point:
        """The point that the variant takes: the best of its grid, or the one chosen in another part.

        A point at which any seed diverged or failed is the last to be taken.
        """
        tried = self.source.tried
        if not tried:
            return self.source.variant.points()[0]
        return max(tried, key=lambda one: (not one.dropped, self.source.part.rank(one.end))).point

    @property
    def found_lr(self) -> list[float]:
        """The step sizes that `lr = "search"` or "auto" found, in the order of the runs."""
        files = [job.run_dir / LR for job in self.running()]
        return [read_lr(file)["values"]["lr"] for file in files if file.exists()]

    # ---- results

    @cached_property
    def series(self) -> Series:
        """All seeds at the point."""
        return self._read(self.running())

    @property
    def curve(self) -> Series:
        """The same in the metric of the part."""
        return self.series.curve(self.part.metric)

    def equal_cost(self, axis: Axis) -> float:
        """The most that every variant with a result has spent in this case, at which all can be compared."""
        curves = [
            cell.curve
            for cell in self.runs.cells
            if cell.part is self.part and cell.row is self.row
        ]
        whole = [curve for curve in curves if curve.alive()]
        return min(float(curve.most(axis)[-1]) for curve in whole or curves)

    def at(self, axis: Axis, cost: float) -> Tail:
        """The result at a cost, of all seeds at the point."""
        curve = self.curve.within({axis: cost})
        return curve.tail(self.part.last(len(curve.rounds)))

    @property
    def reached(self) -> list[float] | None:
        """[rounds, bytes up, bytes both ways] until the mean over seeds first reaches the row's target; None: never."""
        if self.row.target is None:
            return None
        curve = self.curve
        there = np.flatnonzero(self.part.sign * (curve.values.mean(0) - self.row.target) > 0)
        spent = [curve.spent[axis] for axis in ("round", "up", "total")]
        return [float(one[there[0]]) for one in spent] if len(there) else None

    @property
    def failures(self) -> list[str]:
        """Runs that failed, and why."""
        points = [*(point for point, _ in self.specs), self.point]
        found = []
        for point, jobs in zip(points, [*self.trying(), self.running()], strict=True):
            name = ", ".join(filter(None, (self.variant.label, settings(point))))
            found += [f"{name}: {why}" for job in jobs if (why := job.failure())]
        return list(dict.fromkeys(found))

    @property
    def events(self) -> list[str]:
        """What went wrong in the runs: per seed the first event of each kind, and how many there are."""
        found = []
        for job in self.running():
            for number, file in enumerate(job.histories()):
                kinds: dict[str, list[str]] = {}
                for row in history.read(file)[1] if file.exists() else []:
                    for event in row.get("events", ()):
                        kinds.setdefault(kind_of(event), []).append(event)
                for first, *others in kinds.values():
                    more = f" ({1 + len(others):,} events or more)" if others else ""
                    found.append(f"seed {job.spec.seed + number}: {first}{more}")
        return found


class Runs:
    """The runs of a study, in one directory."""

    def __init__(self, study: Study, place: Path) -> None:
        self.study, self.place = study, place
        self.cells = [Cell(self, part, *pair) for part in study.parts for pair in part.cells()]

    def ready(self) -> list[Job]:
        """The runs that can begin now: those of the next stage of a tuning, or at the point that it chose."""
        found = list[Job]()
        for cell in self.cells:
            if cell.awaited is None or not all(job.ended() for job in cell.awaited):
                continue
            trials = [job for jobs in cell.source.trying() for job in jobs]
            cell.awaited = [job for job in trials if not job.ended()] or None
            found += cell.awaited or cell.running()
        return found

    def tuning(self) -> list[Job]:
        """The runs that decide the points, as far as is known which of them are dropped."""
        return [job for cell in self.cells for jobs in cell.trying() for job in jobs]

    def final(self) -> list[Job]:
        """All seeds of every variant at its point."""
        return [job for cell in self.cells for job in cell.running()]

    def jobs(self) -> list[Job]:
        """All runs of the study."""
        return self.tuning() + self.final()

    def possible(self) -> list[Job]:
        """All runs that may be made, whatever the tuning chooses."""
        found = []
        for cell in self.cells:
            for n, (_, spec) in enumerate(cell.specs):
                ends = [stage_end(spec.rounds, spec.eval_every, share) for share in cell.stages]
                found += [job for rounds in (spec.rounds, *ends) for job in cell.trial(n, rounds)]
            found += [job for point in cell.variant.points() for job in cell.running(point)]
        return found


def edges(variant: Variant, point: Point) -> Point:
    """The settings of a point that lie at an end of their grid, so that a better value may lie beyond it."""
    found = {}
    for key, values in variant.grid.items():
        numbers = len(values) > 1 and all(isinstance(one, int | float) for one in values)
        if numbers and point.get(key) in (min(values), max(values)):
            found[key] = point[key]
    return found


def by_seed(part: Part, curve: Series) -> list[float]:
    """The result of every seed, as in `Part.result`; nan for one that diverged or failed."""
    curve = part.inside(curve)
    ends = np.full(len(curve.seeds), math.nan)
    ends[curve.alive()] = curve.ends(part.last(len(curve.rounds)))
    return ends.tolist()
