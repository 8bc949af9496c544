"""Runs that take longest begin first, so that all processes are busy to the end."""

from __future__ import annotations

import dataclasses
import heapq
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedspan.core.spec import Spec
from fedspan.study import conduct, execute
from fedspan.study.execute import Queue, work
from fedspan.study.jobs import Job
from fedspan.study.model import Part, Study, Variant
from fedspan.study.tuning import Runs
from support.loops import RUN


@dataclasses.dataclass(frozen=True)
class Timed(Job):
    """A run that takes as long as its rounds say."""

    made: list[Path] = dataclasses.field(default_factory=list)

    def complete(self) -> bool:
        return self.run_dir in self.made


def timed(rounds: int, number: int, made: list[Path], keep: bool = False) -> Timed:
    spec = Spec.from_table(RUN | {"rounds": rounds})
    return Timed(spec, Path(f"{rounds}-{number}"), 1, keep, made)


def makespan(jobs: list[Timed], take: Any) -> float:
    """When two processes have made all runs."""
    now, running = 0.0, list[float]()
    for _ in jobs:
        if len(running) == 2:
            now = heapq.heappop(running)
        heapq.heappush(running, now + work(take()))
    return max(running)


def test_the_longest_runs_begin_first() -> None:
    """Short runs are first, as a study lists them."""
    jobs = [timed(*pair, []) for pair in [(10, n) for n in range(8)] + [(50, n) for n in range(3)]]
    best = sum(map(work, jobs)) / 2
    longest, listed = makespan(jobs, Queue(jobs).take), makespan(jobs, iter(jobs).__next__)
    assert longest <= best + work(jobs[0]) < listed


def test_tuning_comes_before_what_waits_for_it_and_a_directory_is_used_once() -> None:
    made: list[Path] = []
    short = timed(5, 1, made, keep=True)
    longer = dataclasses.replace(short, spec=timed(100, 1, made).spec, keep=False)
    schedule = Queue([timed(200, 2, made), short])
    first = schedule.take()
    assert first is short
    schedule.add([longer])
    assert [schedule.take({short.run_dir}) for _ in range(2)] == [timed(200, 2, made), None]
    assert schedule.take() is longer


@pytest.mark.parametrize("processes", [1, 2])
def test_runs_at_chosen_points_begin_when_their_own_tuning_is_done(
    processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two methods: no run at a chosen point waits for the tuning of the other one, and results are the same."""
    grid = {"method.lr": [0.001, 0.01]}
    made = [{"method": {"name": name, "local_steps": 2}} for name in ("fedavg", "scaffold")]
    variants = [Variant(one["method"]["name"], "x", "#000000", one, grid) for one in made]  # type: ignore[arg-type]
    study = Study(
        "s", [Part(name="p", base=RUN, variants=variants, seeds=2, metric="rel_err", goal="min")]
    )
    if processes == 2:
        order: list[str] = []
        monkeypatch.setattr(execute, "_apart", lambda todo, *_: _one_by_one(todo, order))
    conduct.make_runs(study, tmp_path, jobs=processes, console=Console(quiet=True))
    runs = Runs(study, tmp_path)
    assert all(job.complete() for job in runs.jobs())
    if processes == 2:
        assert len(order) == len({job.run_dir for job in runs.jobs()})


def _one_by_one(todo: Queue, order: list[str]) -> Any:
    """The schedule of several processes, in this one."""
    while (job := todo.take()) is not None:
        order.append(str(job.run_dir))
        execute._run(job, lambda *_: None)
        yield job


def test_a_run_that_another_process_makes_longer_is_not_complete(tmp_path: Path) -> None:
    """Its history has grown, and the file that tells how the shorter run ended may still be seen."""
    spec, outcome = (
        Spec.from_table(RUN | {"rounds": 2, "eval_every": 1}),
        tmp_path / "a" / "result.json",
    )
    execute.run(spec, tmp_path / "a")
    assert Job(spec, tmp_path / "a", 1).complete()
    before = outcome.read_bytes()
    execute.run(dataclasses.replace(spec, rounds=4), tmp_path / "a", resume=True)
    outcome.write_bytes(before)
    assert not Job(dataclasses.replace(spec, rounds=9), tmp_path / "a", 1).complete()
