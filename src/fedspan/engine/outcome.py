"""The files of a run directory, and how a run ended: `result.json` with the checksums of what the run has left."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedspan.core.errors import ChangedError, CheckpointError
from fedspan.core.files import write_atomic
from fedspan.core.sealed import REMEDY, read_table, table_text
from fedspan.engine import history

MODEL, SPEC, OUTCOME, CHECKPOINT = (
    "model.safetensors",
    "spec.toml",
    "result.json",
    "checkpoint.safetensors",
)
CLIENTS = "per_client.jsonl"
TRAFFIC = "clients.csv"  # bytes of each client
AUDIT = "audit.jsonl"  # who took part when
LR = "lr.json"  # how the step size was found
TRIALS = "lr-trials.json"  # the finished trials of a search that was interrupted
BEST = "best.safetensors"  # the best model so far of an unfinished run
TABLE = "history.csv"  # the evaluations, by the callback `csv`
ROUNDS, ROSTER = (
    "rounds.jsonl",
    "roster.json",
)  # of a server: its rounds, and which node each client belongs to
STATUS = re.compile(r"(finished|interrupted)$|(stopped|diverged) at round \d+")
OUTCOME_FORM = {"seeds": list[int], "statuses": list[str], "files": dict[str, str]}
CHECKPOINT_FORM = {
    "decisions": dict[str, Any], "identity": str, "seeds": list[int], "round": int, "history": list[list[Any]],
}  # fmt: skip
OUTCOME_MORE = {
    "model_rounds": dict[str, int],
    "audit": dict[str, str],
    "decisions": dict[str, Any],
    "identity": str,
}


def seed_dirs(run_dir: Path, seeds: Sequence[int]) -> list[Path]:
    """The directories of a run's seeds: the run directory itself for one, `seed-*` below it for several."""
    return [run_dir] if len(seeds) == 1 else [run_dir / f"seed-{seed}" for seed in seeds]


def write_outcome(
    run_dir: Path,
    seeds: Sequence[int],
    statuses: Sequence[str],
    about: Mapping[str, Any] | None = None,
) -> None:
    """Notes how a run ended, with checksums of its files; a run without this file is unfinished."""
    write_atomic(run_dir / OUTCOME, outcome_text(run_dir, seeds, statuses, about))


def outcome_text(
    run_dir: Path,
    seeds: Sequence[int],
    statuses: Sequence[str],
    about: Mapping[str, Any] | None = None,
) -> bytes:
    """What `write_outcome` writes."""
    files = [
        folder / name
        for folder in seed_dirs(run_dir, seeds)
        for name in (history.NAME, MODEL, CLIENTS)
    ]
    sums = {
        path.relative_to(run_dir).as_posix(): _checksum(path) for path in files if path.exists()
    }
    return table_text(
        {"seeds": list(seeds), "statuses": list(statuses), "files": sums, **(about or {})}
    )


def read_outcome(run_dir: Path) -> dict[str, Any]:
    """How a run ended; empty where it has not. The files that it left must be as it left them."""
    path = run_dir / OUTCOME
    if not path.exists():
        return {}
    found = read_table(path, OUTCOME_FORM, OUTCOME_MORE)
    seeds, kept = found["seeds"], found.get("model_rounds", {})
    known = all(map(STATUS.match, found["statuses"])) and kept.keys() <= set(map(str, seeds))
    if not known or not len(set(seeds)) == len(found["statuses"]) == len(seeds):
        raise CheckpointError(
            f"{str(path)!r} is damaged: it does not say how each of its seeds ended; {REMEDY}"
        )
    for name, checksum in found["files"].items():
        if not (run_dir / name).exists() or _checksum(run_dir / name) != checksum:
            raise ChangedError(
                f"{str(run_dir / name)!r} is missing or was changed after the run; put it back, or run again"
            )
    return found


def read_lr(path: Path) -> dict[str, Any]:
    """How the step size of a run was found."""
    found = read_table(path, {"rule": str, "values": dict[str, float]}, {"cost": str})
    if found["values"].keys() not in ({"lr"}, {"lr", "server_lr"}):
        raise CheckpointError(
            f"{str(path)!r} is damaged: it has step sizes {[*found['values']]}; {REMEDY}"
        )
    return found


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(
            file, functools.partial(hashlib.blake2b, digest_size=16)
        ).hexdigest()
