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

SPEEDS = {"fedavg": 1.0, "ssf": 5.0}  # seconds per unit of work


@dataclasses.dataclass(frozen=True)
class Timed(Job):
    """A run that takes as long as its method says."""

    made: list[Path] = dataclasses.field(default_factory=list)

    def complete(self) -> bool:
        return self.run_dir in self.made

    def seconds(self) -> float:
        return SPEEDS[self.run_dir.name.split("-")[0]] * work(self) if self.complete() else 0.0


def timed(name: str, rounds: int, number: int, made: list[Path], keep: bool = False) -> Timed:
    table = RUN | {"rounds": rounds, "method": {"name": name, "lr": 0.1, "local_steps": 2}}
    return Timed(Spec.from_table(table), Path(f"{name}-{number}"), 1, keep, made)


def makespan(schedule: Queue, in_order: bool) -> tuple[float, list[str]]:
    """When two processes have made all runs, and the order in which these began."""
    now, running, order = 0.0, list[tuple[float, int, Any]](), list[str]()
    while True:
        free = len(running) < 2
        job: Any = schedule.take({one.run_dir for *_, one in running}, in_order) if free else None
        if job is not None:
            order.append(str(job.run_dir))
            job.made.append(job.run_dir)
            heapq.heappush(running, (now + job.seconds(), len(order), job))
            job.made.pop()
            continue
        if not running:
            return now, order
        now, _, ended = heapq.heappop(running)
        ended.made.append(ended.run_dir)
        schedule.done(ended)


def mixed(made: list[Path]) -> list[Timed]:
    """Short runs first, as a study lists them."""
    return [timed("fedavg", 10, n, made) for n in range(8)] + [
        timed("ssf", 10, n, made) for n in range(3)
    ]


def test_the_longest_runs_begin_first() -> None:
    made: list[Path] = []
    ends = {in_order: makespan(Queue(mixed([])), in_order)[0] for in_order in (True, False)}
    best = sum(SPEEDS[name] * count for name, count in (("fedavg", 8), ("ssf", 3))) / 2
    one = work(timed("fedavg", 10, 0, made))
    assert ends[False] <= (best + 1) * one < ends[True]


def test_finished_runs_tell_how_long_others_take() -> None:
    made = [Path("ssf-9"), Path("fedavg-9")]
    known = [timed("ssf", 10, 9, made), timed("fedavg", 10, 9, made)]
    schedule = Queue([*known, timed("fedavg", 30, 0, made), timed("ssf", 10, 1, made)])
    first = schedule.take()
    assert first is not None
    assert first.run_dir == Path("ssf-1")  # 5 × 10 against 30


def test_tuning_comes_before_what_waits_for_it_and_a_directory_is_used_once() -> None:
    made: list[Path] = []
    later = [timed("ssf", 100, 1, made)]
    schedule = Queue(
        [timed("ssf", 5, 1, made, keep=True)], lambda: [later.pop()] if made and later else []
    )
    first = schedule.take()
    assert first is not None
    assert first.keep
    made.append(Path("other"))
    schedule.done(timed("ssf", 5, 2, made))
    assert schedule.take({first.run_dir}) is None
    longer = schedule.take()
    assert longer is not None
    assert longer.spec.rounds == 100


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
        yield job, execute._run(job, lambda *_: None)
        todo.done(job)


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
