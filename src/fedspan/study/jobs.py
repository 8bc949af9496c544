"""A run of a study: where it is kept, what decides it, whether it has ended, and how long it took.

What decides a run besides its settings is code, data and initial weights of the user's own. A spec names a plugin's
method, a data module or a data file, and each may change while the spec stays the same. Their fingerprints keep runs of
the old ones apart from runs of the new ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedspan.core import registry, tables
from fedspan.core.digest import digest, sha256, source_of
from fedspan.core.errors import DataError
from fedspan.core.json_log import read_table
from fedspan.core.spec import Spec, flat
from fedspan.engine import history
from fedspan.engine.loop import Line
from fedspan.engine.provenance import OUTCOME
from fedspan.tasks.custom import Custom, _digest

FAILED = "failed.txt"  # the reason in one line, then the traceback


@dataclass(frozen=True)
class Job:
    """One run of a spec for one or several seeds, in its own run directory."""

    spec: Spec
    run_dir: Path
    seeds: int
    keep: bool = False  # keep the checkpoint at the end, so that another job can run it longer

    def histories(self) -> list[Path]:
        """The history files of the run, in the order of its seeds."""
        if self.seeds == 1:
            return [self.run_dir / history.NAME]
        seeds = range(self.spec.seed, self.spec.seed + self.seeds)
        return [self.run_dir / f"seed-{seed}" / history.NAME for seed in seeds]

    def _ends(self) -> list[Line]:
        """The last evaluation of every seed that has one."""
        rows = [history.read(path)[1] for path in self.histories() if path.exists()]
        return [seed[-1] for seed in rows if seed]

    def complete(self) -> bool:
        """Whether every seed has a history that is long enough, has diverged, or was ended by a callback."""
        ends = self._ends()
        if len(ends) < self.seeds:
            return False
        if all(end["round"] >= self.spec.rounds or end.get("diverged") for end in ends):
            return True
        try:  # another job may be running it longer, so its files are not checked
            statuses = read_table(self.run_dir / OUTCOME, {"statuses": list[str]})["statuses"]
        except FileNotFoundError:
            return False
        return all(one.startswith(("stopped", "diverged")) for one in statuses)

    def failure(self) -> str | None:
        """Why the run failed, in one line; None: it did not."""
        path = self.run_dir / FAILED
        if not path.exists() or self.complete():
            return None
        return path.read_text("utf-8", "replace").partition("\n")[0]

    def ended(self) -> bool:
        """Whether there is nothing more to wait for."""
        return self.complete() or self.failure() is not None

    def forget_failure(self) -> None:
        """The run is to be tried again."""
        (self.run_dir / FAILED).unlink(missing_ok=True)

    def seconds(self) -> float:
        """Computing time; the seeds of a batched computation share one clock."""
        return max((float(end["seconds"]) for end in self._ends()), default=0.0)


def jobs_of(spec: Spec, runs: Path, seeds: int, keep: bool = False) -> list[Job]:
    """A spec under several seeds: one batched computation where the task supports it, else one job per seed."""
    place = place_of(spec, runs)
    if spec.task.several_seeds:
        return [Job(spec, place / f"{seeds}-seeds", seeds, keep)]
    return [
        Job(dataclasses.replace(spec, seed=seed), place / f"seed-{seed}", 1, keep)
        for seed in range(spec.seed, spec.seed + seeds)
    ]


def place_of(spec: Spec, runs: Path) -> Path:
    """Where the runs of a spec are, whatever their seed and length; a step size that is searched is for one length.

    Runs with other code, data or initial weights of the user's are elsewhere: they are never taken for these.
    """
    parts = [registry.name_of(spec.method), spec.identity()]
    if own := fingerprint(spec):
        parts.append(own)
    if isinstance(spec.method.lr, str):
        parts.append(f"{spec.rounds}-rounds")
    return runs / "-".join(parts)


def seconds(jobs: Iterable[Job]) -> float:
    """Computing time of the runs of these jobs; a run that several jobs share counts once."""
    return sum(job.seconds() for job in {job.run_dir: job for job in jobs}.values())


# ---- what decides a run besides its settings

_of_tasks: dict[str, list[str]] = {}  # what a spec file names is read once per process


def fingerprint(spec: Spec) -> str:
    """A hash of everything that is the user's own; empty if all comes with fedspan."""
    own = [_source(cls) for cls in map(type, _choices(spec))]
    if isinstance(spec.task, Custom) and spec.task.objects is not None:
        given = spec.task.objects
        if "fingerprint" not in vars(given):  # every run of a comparison asks for it
            data = [dict(given.model.state_dict()), given.clients, given.test, given.validation]
            vars(given)["fingerprint"] = [_digest(one) for one in data]
        own += vars(given)["fingerprint"]
    else:
        table = tables.describe(spec.task)
        key = json.dumps(table)
        if key not in _of_tasks:
            found = _of_tasks[key] = [
                sha256(Path(name))[:16]
                for name in flat(table).values()
                if isinstance(name, str) and len(name) < 1000 and Path(name).is_file()
            ]
            if isinstance(spec.task, Custom) and spec.task.clients is not None:  # from a module
                read = spec.task.material(0, torch.float32)
                found += [_digest(read.test()), _digest(read.validation())]
                with contextlib.suppress(DataError, OSError):  # data that is on other machines
                    found.append(_digest(list(read.clients)))
        own += _of_tasks[key]
    return digest(json.dumps(own), size=4) if own else ""


def _choices(value: Any) -> Iterator[Any]:
    """Every method, projector, metric and so on in a value whose class does not come with fedspan."""
    if isinstance(value, list | tuple):
        for inner in value:
            yield from _choices(inner)
    elif dataclasses.is_dataclass(value):
        own = not type(value).__module__.startswith("fedspan.")
        if own and registry.kind_of(type(value)) is not None:
            yield value
        for one in dataclasses.fields(value):
            yield from _choices(getattr(value, one.name))


def _source(cls: type) -> str:
    """A hash of the file that a class is in; of a script that is run, of the class alone."""
    file = None if cls.__module__ == "__main__" else inspect.getsourcefile(cls)
    if file is None or not Path(file).is_file():
        return source_of(cls)
    return digest(Path(file).read_bytes())
