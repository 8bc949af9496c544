"""Many runs in several processes of one thread each, with one progress bar. What is complete is not run again."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedspan import experiment
from fedspan.runtimes import history
from fedspan.runtimes.folder import CHECKPOINT


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


def carry_out(jobs: list[Job], processes: int, console: Console, what: str) -> None:
    """Run all jobs that are not complete, in order; of two in one folder the longer."""
    longest: dict[Path, Job] = {}
    for job in jobs:
        if job.folder not in longest or job.spec.rounds > longest[job.folder].spec.rounds:
            longest[job.folder] = job
    todo = [job for job in longest.values() if not job.complete()]
    total = sum(job.spec.rounds for job in todo)
    columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %")]
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task(what, total=total or 1, completed=0 if total else 1)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(processes, context, _one_thread) as pool:
            waiting = {pool.submit(_run, job): job for job in todo}
            try:
                for future in as_completed(waiting):
                    if not future.result():
                        raise KeyboardInterrupt
                    progress.advance(bar, waiting[future].spec.rounds)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                console.print("stopped; the same command goes on from here")
                raise


def _one_thread() -> None:
    import torch

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


def _run(job: Job) -> bool:
    resume = (job.folder / CHECKPOINT).exists()
    if not resume:
        shutil.rmtree(job.folder, ignore_errors=True)
    return experiment.run(job.spec, job.folder, seeds=job.seeds, resume=resume).finished
