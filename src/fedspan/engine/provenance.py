"""How a run ended: the files of its directory, and `result.json`, the card of its models.

The card is written last. It says how the models were trained, on which data and with which result, and has the hashes
of all other files of the run, so that who signs the card signs them all. `fedspan.load` and `fedspan report` refuse a
run of which a file that they read is not that of its card.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedspan.core.digest import sha256
from fedspan.core.errors import CheckpointError
from fedspan.core.json_log import REMEDY, read_table, write_table
from fedspan.core.spec import Table
from fedspan.engine import history

if TYPE_CHECKING:
    from fedspan.engine.result import Result

MODEL, SPEC = "model.safetensors", "spec.toml"
USAGE = "model.json"  # how the model is built and used
OUTCOME, CHECKPOINT = "result.json", "checkpoint.safetensors"
CLIENTS = "per_client.jsonl"
TRAFFIC = "clients.csv"  # bytes of each client
AUDIT = "audit.jsonl"  # who took part when
LR = "lr.json"  # how the step size was found
TRIALS = "lr-trials.json"  # the finished trials of a search that was interrupted
BEST = "best.safetensors"  # the best model so far of an unfinished run
TABLE = "history.csv"  # the evaluations, by the callback `csv`
ROSTER = "roster.json"  # of a server: which node each client belongs to
READ = (history.NAME, MODEL, USAGE, CLIENTS, LR, OUTCOME)  # what `fedspan.load` reads
UNFINISHED = (CHECKPOINT, BEST)  # which a finished run keeps only to go on
OPTIONAL = (TABLE, *UNFINISHED)  # nothing reads them as the record, so that they may be added later
COVERED = (*READ, AUDIT, TRAFFIC, SPEC, ROSTER, *OPTIONAL)
STATUS = re.compile(r"(finished|interrupted)$|(stopped|diverged) at round \d+")
FILE = re.compile(r"(seed-\d+/)?[\w.-]+")
FORM = {"seeds": list[int], "statuses": list[str], "files": dict[str, str]}
MORE = {
    "run": str, "rounds": int, "model_rounds": dict[str, int], "decisions": dict[str, Any], "identity": str,
    "spec": dict[str, Any],
}  # fmt: skip


def seed_dirs(run_dir: Path, seeds: Sequence[int]) -> list[Path]:
    """The directories of a run's seeds: the run directory itself for one, `seed-*` below it for several."""
    return [run_dir] if len(seeds) == 1 else [run_dir / f"seed-{seed}" for seed in seeds]


def write_outcome(
    run_dir: Path,
    result: Result,
    about: Mapping[str, Any] | None = None,
    *,
    keeps: bool = False,
) -> None:
    """Writes how the models of a run that has ended are used, and its card; a run without one is unfinished.

    Args:
        run_dir: The directory of the run.
        result: What it came to.
        about: What else the card says.
        keeps: Whether the checkpoint stays.
    """
    if result.usage:
        write_table(run_dir / USAGE, result.usage)
    several = len(result.seeds) > 1
    places = ["", *(f"seed-{seed}/" for seed in result.seeds if several)]
    left = [name for name in COVERED if keeps or name not in UNFINISHED]
    names = [place + name for place in places for name in left]
    names = [name for name in names if name != OUTCOME and (run_dir / name).exists()]
    card: Table = {"seeds": list(result.seeds), "statuses": result.statuses}
    if result.model_rounds:
        card["model_rounds"] = {str(seed): t for seed, t in result.model_rounds.items()}
    card |= {**(about or {}), "files": {name: sha256(run_dir / name) for name in names}}
    write_table(run_dir / OUTCOME, card)


def read_outcome(run_dir: Path) -> Table:
    """The card of a run; empty where it has not ended."""
    path = run_dir / OUTCOME
    if not path.exists():
        return {}
    card = read_table(path, FORM, MORE)
    seeds, kept = card["seeds"], card.get("model_rounds", {})
    known = all(map(STATUS.match, card["statuses"])) and kept.keys() <= set(map(str, seeds))
    if not known or not len(set(seeds)) == len(card["statuses"]) == len(seeds):
        raise CheckpointError(
            f"{str(path)!r} is damaged: it does not say how each of its seeds ended; {REMEDY}"
        )
    return card


def changes(run_dir: Path, card: Table, names: Sequence[str] = COVERED) -> list[str]:
    """What is wrong with a card and with the files of these names."""
    wrong, files = list[str](), card["files"]
    for name, digest in files.items():
        path = run_dir / name
        if not FILE.fullmatch(name):
            wrong.append(f"{str(run_dir / OUTCOME)!r} names the file {name!r}")
        elif path.name in names and path.is_file():
            wrong += [f"{str(path)!r} was changed after the run"] * (sha256(path) != digest)
        elif path.name in names and path.name not in UNFINISHED:  # they may be deleted to save disk
            wrong.append(f"{str(path)!r} is missing")
    for place in ("", *(f"{folder.name}/" for folder in sorted(run_dir.glob("seed-*")))):
        for name in sorted(place + name for name in names if name not in OPTIONAL):
            if name not in (OUTCOME, *files) and (run_dir / name).exists():
                wrong.append(f"{str(run_dir / name)!r} was added after the run")
    return wrong


def check_run(run_dir: Path, folders: Sequence[Path]) -> list[Table]:
    """The cards of a run; raises where a file that `fedspan.load` reads is not as the run left it.

    Args:
        run_dir: The directory of the run.
        folders: Those of its seeds, which have cards of their own where the run was interrupted between two of them.
    """
    cards = []
    for place in [run_dir] if (run_dir / OUTCOME).exists() else folders:
        if card := read_outcome(place):
            cards.append(card)
            if wrong := changes(place, card, READ):
                raise CheckpointError(
                    f"{wrong[0]}; put back what the run has written, or run again"
                )
    return cards


def read_lr(path: Path) -> dict[str, Any]:
    """How the step size of a run was found."""
    found = read_table(path, {"rule": str, "values": dict[str, float]}, {"cost": str})
    if found["values"].keys() not in ({"lr"}, {"lr", "server_lr"}):
        raise CheckpointError(
            f"{str(path)!r} is damaged: it has step sizes {[*found['values']]}; {REMEDY}"
        )
    return found
