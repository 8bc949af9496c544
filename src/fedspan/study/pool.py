"""Many runs, one after another or in processes of one thread each, with one progress bar for all of them.

What is complete is not run again, and what was cut short is resumed. A run that fails stops no other: why it failed
stands in its folder. Ctrl-C and SIGTERM end all of them after the round in hand, and so does the end of the process
that asked for them, whatever ended it.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedspan.api import spec as experiment
from fedspan.core import registry
from fedspan.core.errors import FedspanError
from fedspan.engine import history
from fedspan.engine.run_dir import CHECKPOINT

FAILED = "failed.txt"  # the reason in one line, then the traceback
End = Literal["finished", "stopped", "failed"]
Seen = Callable[[Path, int], None]  # folder, round
Reports = SimpleQueue[tuple[Path, int]]
_reports: Reports  # in a worker process: how far its run has come
_stop: Event  # in a worker process: end the run in hand, and begin no other


@dataclass(frozen=True)
class Job:
    """One run of a spec for one or several seeds, in its own folder."""

    spec: experiment.Spec
    folder: Path
    seeds: int

    def histories(self) -> list[Path]:
        """The histories it writes, in the order of its seeds."""
        first = self.spec.seed
        folders = [self.folder / f"seed-{seed}" for seed in range(first, first + self.seeds)]
        return [folder / history.NAME for folder in ([self.folder] if self.seeds == 1 else folders)]

    def complete(self) -> bool:
        """Whether it is there for all seeds and has gone far enough, or diverged."""
        ends = [history.read(path)[1][-1:] for path in self.histories() if path.exists()]
        enough = [bool(end) and (end[0]["round"] >= self.spec.rounds or bool(end[0].get("diverged"))) for end in ends]
        return len(enough) == self.seeds and all(enough)

    def failure(self) -> str | None:
        """Why it failed, in one line; None: it did not."""
        path = self.folder / FAILED
        return path.read_text().partition("\n")[0] if path.exists() and not self.complete() else None

    def seconds(self) -> float:
        """Computing time; seeds of one batched computation share one clock."""
        ends = [history.read(path)[1][-1:] for path in self.histories() if path.exists()]
        return max((float(end[0]["seconds"]) for end in ends if end), default=0.0)


def seconds(jobs: Iterable[Job]) -> float:
    """Computing time of the runs of these jobs, each run counted once."""
    return sum(job.seconds() for job in {job.folder: job for job in jobs}.values())


def execute(jobs: list[Job], processes: int, console: Console, what: str, plugins: tuple[Path, ...] = ()) -> None:
    """Run all jobs that are not complete, in order; of two in one folder the longer."""
    longest: dict[Path, Job] = {}
    for job in jobs:
        if job.folder not in longest or job.spec.rounds > longest[job.folder].spec.rounds:
            longest[job.folder] = job
    todo = [job for job in longest.values() if not job.complete()]
    if not todo:
        return
    total, far = sum(job.spec.rounds for job in todo), dict.fromkeys(longest, 0)
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %  {task.fields[runs]}"),
    ]
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task(what, total=total, runs=f"{len(todo)} runs")

        def seen(folder: Path, t: int) -> None:
            far[folder] = t
            progress.update(bar, completed=sum(far.values()))

        try:
            ends = _here(todo, seen) if processes == 1 else _apart(todo, min(processes, len(todo)), plugins, seen)
            for number, (job, end) in enumerate(ends, 1):
                if end == "stopped":
                    raise KeyboardInterrupt
                seen(job.folder, job.spec.rounds)
                progress.update(bar, runs=f"{number} of {len(todo)} runs")
                if end == "failed":
                    where = f"{job.folder.parent.name}/{job.folder.name}"
                    console.print(f"{where} failed: {escape(str(job.failure()))}", highlight=False, soft_wrap=True)
        except BaseException:
            console.print("stopped; what is done is kept and not run again")
            raise


def _here(todo: list[Job], seen: Seen) -> Iterator[tuple[Job, End]]:
    """In this process, one after another."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for job in todo:
            yield job, _run(job, seen)
    finally:
        torch.set_num_threads(threads)


def _apart(todo: list[Job], processes: int, plugins: tuple[Path, ...], seen: Seen) -> Iterator[tuple[Job, End]]:
    """In several processes, as they end."""
    context = multiprocessing.get_context("spawn")
    reports: Reports = context.SimpleQueue()
    stop = context.Event()
    with _interrupted(), ProcessPoolExecutor(processes, context, _ready, (reports, stop, plugins)) as pool:
        waiting: dict[Future[End], Job] = {pool.submit(_run_apart, job): job for job in todo}
        try:
            while waiting:
                done, _ = wait(waiting, 0.2, FIRST_COMPLETED)
                while not reports.empty():
                    seen(*reports.get())
                for future in done:
                    yield waiting.pop(future), future.result()
        except BrokenProcessPool:
            raise FedspanError("a process was killed, most likely for want of memory; use fewer --jobs") from None
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


@contextmanager
def _interrupted() -> Iterator[None]:
    """SIGTERM is taken as Ctrl-C, so that what was begun is ended in order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _ready(reports: Reports, stop: Event, plugins: tuple[Path, ...]) -> None:
    """Make a process ready: one thread, the user's own methods, and where to report to."""
    import torch

    global _reports, _stop
    _reports, _stop = reports, stop
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    for path in plugins:
        registry.load_file(path)
    threading.Thread(target=_obey, daemon=True).start()


def _obey() -> None:
    """End this process, a run after its round in hand, when all are stopped or the process that asked is gone."""
    while not (_alone() or _stop.wait(1.0)):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _run_apart(job: Job) -> End:
    end = "stopped" if _stop.is_set() else _run(job, lambda folder, t: _reports.put((folder, t)))
    if _alone():
        os._exit(1)  # nobody is there to be told, or to say that there is no more
    return end


def _alone() -> bool:
    """Whether the process that asked for the runs is gone."""
    asked_by = multiprocessing.parent_process()
    return asked_by is not None and not asked_by.is_alive()


def _run(job: Job, seen: Seen) -> End:
    failed = job.folder / FAILED
    failed.unlink(missing_ok=True)
    resume = (job.folder / CHECKPOINT).exists()
    if not resume:
        shutil.rmtree(job.folder, ignore_errors=True)
    try:
        result = experiment.run(
            job.spec, job.folder, seeds=job.seeds, resume=resume, on_row=lambda row: seen(job.folder, row.round)
        )
    except Exception as error:
        name = "" if isinstance(error, FedspanError) else f"{type(error).__name__}: "
        job.folder.mkdir(parents=True, exist_ok=True)
        failed.write_text(f"{name}{' '.join(str(error).split())}\n\n{traceback.format_exc()}")
        return "failed"
    return "finished" if result.finished else "stopped"
