"""A run of a study: where it is kept, whether it has ended, and how long it took."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedspan.core import registry
from fedspan.core.errors import FedspanError
from fedspan.core.json_log import read_table
from fedspan.core.spec import Spec
from fedspan.engine import history
from fedspan.engine.provenance import OUTCOME
from fedspan.study.fingerprint import digest, fingerprint

FAILED = "failed.txt"  # the reason in one line, then the traceback


@dataclass(frozen=True)
class Job:
    """One run of a spec for one or several seeds, in its own run directory."""

    spec: Spec
    run_dir: Path
    seeds: int
    keep: bool = False  # keep the checkpoint at the end, so that another job can run it longer
    what: str = field(default="", kw_only=True)  # in words

    def histories(self) -> list[Path]:
        """The history files of the run, in the order of its seeds."""
        first = self.spec.seed
        several = [self.run_dir / f"seed-{seed}" for seed in range(first, first + self.seeds)]
        return [one / history.NAME for one in ([self.run_dir] if self.seeds == 1 else several)]

    def complete(self) -> bool:
        """Whether every seed has a history that is long enough, has diverged, or was ended by a callback."""
        ends = [history.read(path)[1][-1:] for path in self.histories() if path.exists()]
        enough = [
            bool(end) and (end[0]["round"] >= self.spec.rounds or bool(end[0].get("diverged")))
            for end in ends
        ]
        return len(enough) == self.seeds and (all(enough) or self._stopped())

    def _stopped(self) -> bool:
        """Whether a callback ended the run. Another job may be running it longer, so its files are not checked."""
        try:
            statuses = read_table(self.run_dir / OUTCOME, {"statuses": list[str]})["statuses"]
        except FileNotFoundError:
            return False
        return all(one.startswith(("stopped", "diverged")) for one in statuses)

    def ended(self) -> bool:
        """Whether there is nothing more to wait for."""
        return self.complete() or self.failure() is not None

    def failure(self) -> str | None:
        """Why the run failed, in one line; None: it did not."""
        path = self.run_dir / FAILED
        return (
            path.read_text("utf-8", "replace").partition("\n")[0]
            if path.exists() and not self.complete()
            else None
        )

    def forget_failure(self) -> None:
        """The run is to be tried again."""
        (self.run_dir / FAILED).unlink(missing_ok=True)

    def seconds(self) -> float:
        """Computing time; the seeds of a batched computation share one clock."""
        ends = [history.read(path)[1][-1:] for path in self.histories() if path.exists()]
        return max((float(end[0]["seconds"]) for end in ends if end), default=0.0)


def jobs_of(spec: Spec, runs: Path, seeds: int, what: str = "") -> list[Job]:
    """A spec under several seeds: one batched computation where the task supports it, else one job per seed."""
    place = place_of(spec, runs)
    if spec.task.several_seeds:
        return [Job(spec, place / f"{seeds}-seeds", seeds, what=what)]
    every = range(spec.seed, spec.seed + seeds)
    return [
        Job(
            dataclasses.replace(spec, seed=seed),
            place / f"seed-{seed}",
            1,
            what=f"{what}, seed {seed}",
        )
        for seed in every
    ]


def place_of(spec: Spec, runs: Path) -> Path:
    """Where the runs of a spec are, whatever their seed and length; a step size that is searched is for one length.

    Runs with other code, data or initial weights of the user's are elsewhere: they are never taken for these.
    """
    own = fingerprint(spec)
    parts = [registry.name_of(spec.method), spec.identity(), *([digest(own)] if own else [])]
    return runs / "-".join(
        [*parts, *([f"{spec.rounds}-rounds"] if isinstance(spec.method.lr, str) else [])]
    )


def identity_of(table: dict[str, Any]) -> str:
    """The identity of a history's spec, also of one that names things which are not registered here."""
    try:
        return Spec.from_table(table).identity()
    except FedspanError:
        return json.dumps({k: v for k, v in table.items() if k not in ("rounds", "seed")})


def seconds(jobs: Iterable[Job]) -> float:
    """Computing time of the runs of these jobs; a run that several jobs share counts once."""
    return sum(job.seconds() for job in {job.run_dir: job for job in jobs}.values())
