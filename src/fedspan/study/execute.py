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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Literal

from rich.console import Console

from fedspan.api.run import run
from fedspan.callbacks._event_log import log
from fedspan.core.callback import Callback
from fedspan.core.errors import FedspanError, Terminated
from fedspan.core.plugins import load_plugin
from fedspan.core.processes import FORKS, NotSentError, Shared, without_script
from fedspan.core.signals import ending_by_sigterm
from fedspan.core.system import release_memory, warn_if_public
from fedspan.core.terminal import say
from fedspan.engine.loop import Loop, Row
from fedspan.engine.provenance import CHECKPOINT
from fedspan.study.bar import progress_of
from fedspan.study.jobs import FAILED, Job
from fedspan.study.schedule import Schedule

End = Literal["finished", "stopped", "failed"]
Seen = Callable[[Path, int], None]  # run directory, round
Begun = Callable[[Iterable[Job]], None]  # the runs that are being made
Reports = SimpleQueue[tuple[Path, int]]
_reports: Reports  # in a worker process: how far its run is
_shared: (
    Shared[dict[str, Job]] | None
)  # in a worker process: jobs with objects, which it is told by name
_stop: Event  # in a worker process: stop the current run, and start no other
GRACE = 20.0  # seconds in which a run whose parent process is gone may save itself
_working = threading.Lock()  # held while a worker process has a run


@ending_by_sigterm()
def execute(
    jobs: list[Job], processes: int, console: Console, plugins: tuple[Path, ...] = (),
    shared: list[Job] | None = None, more: Callable[[], list[Job]] | None = None,
) -> None:  # fmt: skip
    """Run all jobs that are not complete: in one process in order, in several those first that take longest.

    Args:
        jobs: The runs that can begin at once.
        processes: How many are made at a time.
        console: Where the progress is shown.
        plugins: The user's own files.
        shared: All runs there may be, if they hold objects such as a model and a loss function. Other processes get
            these once, as they start.
        more: Runs that can begin once others have ended; asked after each one.
    """
    todo = Schedule(jobs, more)
    if not todo.waiting:
        return
    warn_if_public()  # worker processes do not
    objects = None
    if processes > 1 and shared is not None:
        try:
            objects = Shared({_name(job): job for job in shared})
        except NotSentError as error:
            warnings.warn(
                f"`jobs` {processes} needs functions and classes that other processes can import ({error}): put them "
                "into a module; running in one process",
                stacklevel=2,
            )
            processes = 1
    far: dict[Path, int] = {}
    with progress_of("runs", console) as bar:

        def seen(run_dir: Path, t: int) -> None:
            far[run_dir] = t
            bar.completed, bar.total = sum(far.values()), todo.total
            bar.show()

        def begun(running: Iterable[Job]) -> None:
            bar.doing(
                f"{number + 1} of {todo.count} runs: {'; '.join(job.what for job in running)}"
            )

        number = 0
        try:
            ends = (
                _here(todo, seen, begun)
                if processes == 1
                else _apart(todo, processes, objects, plugins, seen, begun)
            )
            for job, end in ends:
                if end == "stopped":
                    raise KeyboardInterrupt
                number += 1
                seen(job.run_dir, job.spec.rounds)
                if end == "failed":
                    where = f"{job.run_dir.parent.name}/{job.run_dir.name}"
                    say(f"{where} failed: {job.failure()}", console)
        except BaseException:
            console.print("stopped; complete runs are kept and are not run again")
            raise


def _here(todo: Schedule, seen: Seen, begun: Begun) -> Iterator[tuple[Job, End]]:
    """In this process, one after another."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        while (job := todo.take(in_order=True)) is not None:
            begun([job])
            yield job, _run(job, seen)
            todo.done(job)
    finally:
        torch.set_num_threads(threads)


def _apart(
    todo: Schedule,
    processes: int,
    objects: Shared[dict[str, Job]] | None,
    plugins: tuple[Path, ...],
    seen: Seen,
    begun: Begun,
) -> Iterator[tuple[Job, End]]:
    """In several processes, in the order in which they end."""
    context = multiprocessing.get_context("fork" if FORKS and objects is not None else "spawn")
    reports: Reports = context.SimpleQueue()
    stop = context.Event()
    with ProcessPoolExecutor(processes, context, _ready, (reports, stop, plugins, objects)) as pool:
        running: dict[Future[End], Job] = {}
        try:
            while True:
                places = {job.run_dir for job in running.values()}
                if len(running) < processes and (job := todo.take(places)) is not None:
                    with without_script():
                        running[pool.submit(_run_apart, job if objects is None else _name(job))] = (
                            job
                        )
                    begun(running.values())
                    continue
                if not running:
                    return
                done, _ = wait(running, 0.2, FIRST_COMPLETED)
                while not reports.empty():
                    seen(*reports.get())
                for future in done:
                    job = running.pop(future)
                    yield job, future.result()
                    todo.done(job)
        except BrokenProcessPool:
            raise FedspanError(
                "a process was killed, most likely because memory ran out; use fewer jobs"
            ) from None
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


def _ready(
    reports: Reports, stop: Event, plugins: tuple[Path, ...], objects: Shared[dict[str, Job]] | None
) -> None:
    """Prepare a worker process: one thread, the user's plugins and objects, and where to report to.

    The parent process handles Ctrl-C. SIGTERM ends the run of this process, which then says that it was stopped.
    """
    import torch

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
    while not (_orphaned() or _stop.wait(1.0)):
        pass
    _thread.interrupt_main(signal.SIGTERM)
    while not _orphaned():
        time.sleep(1.0)
    _working.acquire(timeout=GRACE)  # not for ever: the run may wait for a parent that is gone
    os._exit(1)


def _name(job: Job) -> str:
    return f"{job.run_dir} {job.spec.rounds} {job.keep}"


def _run_apart(given: Job | str) -> End:
    if isinstance(given, str):
        assert _shared is not None
        given = _shared.value[given]
    with _working, suppress(Terminated, KeyboardInterrupt):
        if not _stop.is_set():
            return _run(given, lambda run_dir, t: _reports.put((run_dir, t)))
    return "stopped"


def _orphaned() -> bool:
    """Whether the parent process is gone."""
    parent = multiprocessing.parent_process()
    return parent is not None and not parent.is_alive()


def _run(job: Job, seen: Seen) -> End:
    failed, began = job.run_dir / FAILED, time.monotonic()
    job.forget_failure()
    resume = (job.run_dir / CHECKPOINT).exists()
    if not resume:
        shutil.rmtree(job.run_dir, ignore_errors=True)
    try:
        with warnings.catch_warnings(), _unlogged():
            warnings.filterwarnings(
                "ignore", "the run of seed"
            )  # a divergence, which the tables show
            callbacks = [_Reporter(job.run_dir, seen)]
            result = run(
                job.spec,
                job.run_dir,
                seeds=job.seeds,
                resume=resume,
                callbacks=callbacks,
                keep_checkpoint=job.keep,
                progress=False,
            )
    except Exception as error:
        name = "" if isinstance(error, FedspanError) else f"{type(error).__name__}: "
        job.run_dir.mkdir(parents=True, exist_ok=True)
        failed.write_text(
            f"{name}{' '.join(str(error).split())}\n\n{traceback.format_exc()}", "utf-8"
        )
        return "failed"
    if not job.complete():  # nothing may wait for it
        failed.write_text(
            f"the run ended before its {job.spec.rounds} rounds ({result.status})\n", "utf-8"
        )
        return "failed"
    if (
        time.monotonic() - began > 1
    ):  # a shorter run leaves little behind, and takes less time than this
        gc.collect()
        release_memory()
    return "finished"


@contextmanager
def _unlogged() -> Iterator[None]:
    """Logs no events, which would break the bar; the page has them."""
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


class _Reporter(Callback):
    """Reports every evaluation to the progress bar."""

    def __init__(self, run_dir: Path, seen: Seen) -> None:
        self.run_dir, self.seen = run_dir, seen

    def on_evaluate(self, run: Loop, row: Row) -> None:
        self.seen(self.run_dir, row.round)
