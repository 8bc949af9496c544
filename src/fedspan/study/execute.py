"""The job runner: many runs, one after another or in processes of one thread each, under one progress bar.

Complete runs are kept and interrupted ones are resumed. A run that fails does not stop the others; its run directory
says why it failed. Ctrl-C and SIGTERM stop all runs after the current round, and so does the end of the parent process.
"""

from __future__ import annotations

import _thread
import gc
import multiprocessing
import os
import shutil
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedspan.api.run import run
from fedspan.core.callback import Callback
from fedspan.core.errors import FedspanError, Terminated
from fedspan.core.json_log import write_table
from fedspan.core.plugins import load_plugin
from fedspan.core.processes import FORKS, NotSentError, Shared, without_script
from fedspan.core.signals import ending_by_sigterm
from fedspan.core.system import release_memory, warn_if_public
from fedspan.core.terminal import log, say
from fedspan.costs.plan import client_memory
from fedspan.engine.loop import Loop, Row
from fedspan.engine.provenance import CHECKPOINT, UNFINISHED
from fedspan.study.curves import memory_file
from fedspan.study.jobs import FAILED, Job

Seen = Callable[[Path, int], None]  # run directory, round
Reports = SimpleQueue[tuple[Path, int]]
Jobs = Shared[dict[str, Job]]
# In a worker process: how far its run is, jobs with objects, which it is told by name, and whether to stop.
_reports: Reports
_shared: Jobs | None
_stop: Event
_working = threading.Lock()  # held while a worker process has a run
GRACE = 20.0  # seconds in which a run whose parent process is gone may save itself


class Queue:
    """The runs that are still to be made; the next is the longest, so that all processes end together.

    Runs that others wait for come first: those of the tuning.

    Args:
        jobs: Those that can begin now. Of two in one run directory, the longer one is made.
        more: Returns what can begin after some runs are done.
    """

    def __init__(self, jobs: Iterable[Job], more: Callable[[], list[Job]] = list) -> None:
        self.waiting: dict[Path, Job] = {}
        self.more, self.count = more, 0
        self.rounds: dict[Path, int] = {}  # run directory → rounds that were asked for
        self.add([*jobs, *more()])

    def take(self, running: Collection[Path] = ()) -> Job | None:
        """The next run, whose directory no other one is using; None if there is none at the moment."""
        while free := [job for place, job in self.waiting.items() if place not in running]:
            chosen = max(free, key=lambda job: (job.keep, work(job)))
            self.waiting.pop(chosen.run_dir)
            if not chosen.complete():  # by another job in the same directory
                return chosen
        return None

    def add(self, jobs: Iterable[Job]) -> None:
        """Add runs that can begin now."""
        for job in jobs:
            before = self.waiting.get(job.run_dir)
            longer = before is None or before.spec.rounds < job.spec.rounds
            if longer and not job.complete():
                self.rounds[job.run_dir] = max(job.spec.rounds, self.rounds.get(job.run_dir, 0))
                self.count += before is None
                self.waiting[job.run_dir] = job


def work(job: Job) -> float:
    """Local steps of a run, up to a factor that all runs on one task share."""
    spec = job.spec
    steps = spec.epochs if spec.epochs is not None else spec.method.local_steps
    return float(spec.rounds * job.seeds * (spec.clients_per_round or 1) * steps)


@ending_by_sigterm()
def execute(
    jobs: list[Job],
    processes: int,
    console: Console,
    plugins: tuple[Path, ...] = (),
    shared: Iterable[Job] = (),
    more: Callable[[], list[Job]] = list,
) -> None:
    """Run all jobs that are not complete.

    Args:
        jobs: The runs that can begin at once.
        processes: How many are made at a time.
        console: Where the progress is shown.
        plugins: The user's own files.
        shared: All runs there may be, if they hold objects such as a model and a loss function. Other processes get
            these once, as they start.
        more: Returns runs that can begin once others have ended; called after each one.
    """
    todo = Queue(jobs, more)
    if not todo.waiting:
        return
    warn_if_public()  # worker processes do not
    named = {_name(job): job for job in shared}
    try:
        objects = Shared(named) if named else None
    except NotSentError as error:
        warnings.warn(
            f"`jobs` {processes} needs functions and classes that other processes can import ({error}): put them "
            "into a module; running in one process",
            stacklevel=2,
        )
        processes = 1
    far: dict[Path, int] = {}
    number = 0
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        TextColumn("{task.percentage:.0f} %"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        expand=True,
    )
    with bar:
        task = bar.add_task("runs", total=None)

        def seen(run_dir: Path, t: int) -> None:
            far[run_dir] = t
            bar.update(task, completed=sum(far.values()), total=sum(todo.rounds.values()))

        ends = _here(todo, seen)
        if processes > 1:
            ends = _apart(todo, processes, objects, plugins, seen)
        try:
            for job in ends:
                why = job.failure()
                if why is not None:
                    say(f"{job.run_dir.parent.name}/{job.run_dir.name} failed: {why}", console)
                elif not job.complete():  # it was stopped
                    raise KeyboardInterrupt
                elif (memory := client_memory(job.spec)) is not None:
                    write_table(memory_file(job.run_dir), {"client_memory": memory})
                number += 1
                seen(job.run_dir, job.spec.rounds)
                todo.add(more())
                bar.update(task, description=f"{number} of {todo.count} runs", refresh=True)
        except BaseException:
            console.print("stopped; complete runs are kept and are not run again")
            raise
        bar.update(task, description="runs", completed=1, total=1)  # also where less was needed


def _here(todo: Queue, seen: Seen) -> Iterator[Job]:
    """In this process, one after another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        while (job := todo.take()) is not None:
            _run(job, seen)
            yield job
    finally:
        torch.set_num_threads(threads)


def _apart(
    todo: Queue,
    processes: int,
    objects: Jobs | None,
    plugins: tuple[Path, ...],
    seen: Seen,
) -> Iterator[Job]:
    """In several processes, in the order in which they end."""
    context = multiprocessing.get_context("fork" if FORKS and objects is not None else "spawn")
    reports: Reports = context.SimpleQueue()
    stop = context.Event()
    with ProcessPoolExecutor(processes, context, _ready, (reports, stop, plugins, objects)) as pool:
        running: dict[Future[None], Job] = {}
        try:
            while True:
                places = {job.run_dir for job in running.values()}
                if len(running) < processes and (job := todo.take(places)) is not None:
                    with without_script():
                        given = job if objects is None else _name(job)
                        running[pool.submit(_run_apart, given)] = job
                    continue
                if not running:
                    return
                done, _ = wait(running, 0.2, FIRST_COMPLETED)
                while not reports.empty():
                    seen(*reports.get())
                for future in done:
                    future.result()
                    yield running.pop(future)
        except BrokenProcessPool:
            raise FedspanError(
                "a process was killed, most likely because memory ran out; use fewer jobs"
            ) from None
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


def _ready(reports: Reports, stop: Event, plugins: tuple[Path, ...], objects: Jobs | None) -> None:
    """Prepare a worker process: one thread, the user's plugins and objects, and where to report to.

    The parent process handles Ctrl-C. SIGTERM stops the run of this process.
    """
    global _reports, _stop, _shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)
    _reports, _stop, _shared = reports, stop, objects
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    for path in plugins:
        load_plugin(path)
    threading.Thread(target=_obey, daemon=True).start()


def _obey() -> None:
    """Stop the run of this process when all are stopped, and end the process when its parent is gone."""

    def orphaned() -> bool:
        parent = multiprocessing.parent_process()
        return parent is not None and not parent.is_alive()

    while not (orphaned() or _stop.wait(1.0)):
        pass
    _thread.interrupt_main(signal.SIGTERM)
    while not orphaned():
        time.sleep(1.0)
    _working.acquire(timeout=GRACE)  # not for ever: the run may wait for a parent that is gone
    os._exit(1)


def _name(job: Job) -> str:
    return f"{job.run_dir} {job.spec.rounds} {job.keep}"


def _run_apart(given: Job | str) -> None:
    job = given if isinstance(given, Job) else _shared.value[given]  # type: ignore[union-attr]
    with _working, suppress(Terminated, KeyboardInterrupt):
        if not _stop.is_set():
            _run(job, lambda run_dir, t: _reports.put((run_dir, t)))


def _run(job: Job, seen: Seen) -> None:
    """One run. Its divergence is not warned of, and its events are not logged: the tables and the page have them."""
    began = time.monotonic()
    job.forget_failure()
    resume = (job.run_dir / CHECKPOINT).exists()
    if not resume:
        shutil.rmtree(job.run_dir, ignore_errors=True)
    unlogged, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the run of seed")
            result = run(
                job.spec,
                job.run_dir,
                seeds=job.seeds,
                resume=resume,
                callbacks=[_Reporter(job.run_dir, seen)],
                progress=False,
            )
        why = f"the run ended before its {job.spec.rounds} rounds ({result.status})\n"
    except Exception as error:
        name = "" if isinstance(error, FedspanError) else f"{type(error).__name__}: "
        why = f"{name}{' '.join(str(error).split())}\n\n{traceback.format_exc()}"
    finally:
        log.disabled = unlogged
    if job.complete():  # if not, nothing may wait for it
        for name in () if job.keep else UNFINISHED:
            (job.run_dir / name).unlink(missing_ok=True)
    else:
        job.run_dir.mkdir(parents=True, exist_ok=True)
        (job.run_dir / FAILED).write_text(why, "utf-8")
    if time.monotonic() - began > 1:  # a shorter run leaves little behind
        gc.collect()
        release_memory()


class _Reporter(Callback):
    """Reports every evaluation to the progress bar."""

    def __init__(self, run_dir: Path, seen: Seen) -> None:
        self.run_dir, self.seen = run_dir, seen

    def on_evaluate(self, run: Loop, row: Row) -> None:
        self.seen(self.run_dir, row.round)
