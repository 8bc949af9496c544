"""Which run of a study is next: the one that is expected to take longest, so that all processes end together.

Runs that others wait for come first: those of the tuning. The time of a run is its rounds times its local steps times
the time per step of finished runs of its method.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from fedspan.core import registry

if TYPE_CHECKING:
    from fedspan.study.jobs import Job


class Schedule:
    """The runs that are still to be made.

    Args:
        jobs: Those that can begin now. Of two in one run directory, the longer one is made.
        more: What can begin after some runs are done, asked whenever one ends.
    """

    def __init__(self, jobs: Iterable[Job], more: Callable[[], list[Job]] | None = None) -> None:
        self.waiting: dict[Path, Job] = {}
        self.more, self.count = more, 0
        self.asked: dict[Path, int] = {}  # run directory → its rounds
        self.spent: dict[
            str, tuple[float, float]
        ] = {}  # method → seconds and units of work of finished runs
        self._add(jobs)
        self._ask()

    @property
    def total(self) -> int:
        """The rounds of all runs that were asked for and are not made again."""
        return sum(self.asked.values())

    def take(self, running: Collection[Path] = (), in_order: bool = False) -> Job | None:
        """The next run, whose directory no other one is using; None if there is none at the moment."""
        while free := [job for place, job in self.waiting.items() if place not in running]:
            chosen = (
                free[0]
                if in_order
                else max(free, key=lambda job: (job.keep, self.expected(job), work(job)))
            )
            self.waiting.pop(chosen.run_dir)
            if not chosen.complete():  # by another job in the same directory
                return chosen
        return None

    def done(self, job: Job) -> None:
        """A run has ended: what it took tells how long others will take, and others may now begin."""
        self._learn(job)
        self._ask()

    def expected(self, job: Job) -> float:
        """Seconds that a run will take; one of a method that nothing is known of may take any time."""
        name = registry.name_of(job.spec.method)
        if name not in self.spent:
            return math.inf
        seconds, units = self.spent[name]
        return work(job) * seconds / units

    def _ask(self) -> None:
        if self.more is not None:
            self._add(self.more())

    def _add(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            before = self.waiting.get(job.run_dir)
            if before is not None and before.spec.rounds >= job.spec.rounds:
                continue
            if job.complete():
                self._learn(job)
                continue
            self.asked[job.run_dir] = max(job.spec.rounds, self.asked.get(job.run_dir, 0))
            self.count += before is None
            self.waiting[job.run_dir] = job

    def _learn(self, job: Job) -> None:
        name, took = registry.name_of(job.spec.method), job.seconds()
        if took and job.failure() is None:
            seconds, units = self.spent.get(name, (0.0, 0.0))
            self.spent[name] = (seconds + took, units + work(job))


def work(job: Job) -> float:
    """Local steps of a run, up to a factor that all runs on one task share."""
    spec = job.spec
    steps = spec.epochs if spec.epochs is not None else spec.method.local_steps
    return float(spec.rounds * job.seeds * (spec.clients_per_round or 1) * steps)
