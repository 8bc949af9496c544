"""The files of a run directory, and how a run ended: `result.json` with the checksums of what the run has left."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedspan.core.errors import CheckpointError
from fedspan.core.sealed import REMEDY, check_form, read_table, write_table
from fedspan.engine import history

MODEL, SPEC, OUTCOME, CHECKPOINT = "model.safetensors", "spec.toml", "result.json", "checkpoint.safetensors"
CLIENTS = "per_client.jsonl"
TRAFFIC = "clients.csv"  # bytes of each client
AUDIT = "audit.jsonl"  # who took part when
LR = "lr.json"  # how the step size was found
TRIALS = "lr-trials.json"  # the finished trials of a search that was interrupted
BEST = "best.safetensors"  # the best model so far of an unfinished run


OUTCOME_FORM = {"seeds": list[int], "statuses": list[str], "files": dict[str, str]}
OUTCOME_MORE = {"model_rounds": dict[str, int], "audit": dict[str, str], "decisions": dict[str, Any], "identity": str}


def seed_dirs(run_dir: Path, seeds: Sequence[int]) -> list[Path]:
    """The directories of a run's seeds: the run directory itself for one, `seed-*` below it for several."""
    return [run_dir] if len(seeds) == 1 else [run_dir / f"seed-{seed}" for seed in seeds]


def write_outcome(
    run_dir: Path, seeds: Sequence[int], statuses: Sequence[str], about: Mapping[str, Any] | None = None
) -> None:
    """Notes how a run ended, with checksums of its files; a run without this file is unfinished."""
    files = [folder / name for folder in seed_dirs(run_dir, seeds) for name in (history.NAME, MODEL, CLIENTS)]
    sums = {str(path.relative_to(run_dir)): _checksum(path) for path in files if path.exists()}
    write_table(run_dir / OUTCOME, {"seeds": list(seeds), "statuses": list(statuses), "files": sums, **(about or {})})


def read_outcome(run_dir: Path) -> dict[str, Any]:
    """How a run ended; empty where it has not. The files that it left must be as it left them."""
    path = run_dir / OUTCOME
    if not path.exists():
        return {}
    found = read_table(path)
    check_form(found, OUTCOME_FORM, path, OUTCOME_MORE)
    kept = found.get("model_rounds", {})
    if len(found["seeds"]) != len(found["statuses"]) or not set(kept) <= set(map(str, found["seeds"])):
        raise CheckpointError(f"{str(path)!r} is damaged: its seeds and statuses do not belong together; {REMEDY}")
    for name, checksum in found["files"].items():
        if not (run_dir / name).exists() or _checksum(run_dir / name) != checksum:
            raise CheckpointError(
                f"{str(run_dir / name)!r} is missing or was changed after the run; put it back, or run again"
            )
    return found


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, functools.partial(hashlib.blake2b, digest_size=16)).hexdigest()
