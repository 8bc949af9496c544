"""How a run ended: the files of its directory, and `result.json`, the card of its models.

The card is written last. It says how the models were trained, on which data and with which result, and has the hashes
of all other files of the run; it is signed where there is a key. `fedspan.load` and `fedspan report` refuse a run of
which a file that they read is not that of its card. The environment variable FEDSPAN_SIGN_KEY names an Ed25519 private
key in a PEM file:

    openssl genpkey -algorithm ed25519 -out sign.pem
    openssl pkey -in sign.pem -pubout -out sign.pub
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedspan.core.digest import sha256
from fedspan.core.errors import CheckpointError, SpecError, one_line
from fedspan.core.extras import needs
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
KEY = "FEDSPAN_SIGN_KEY"
READ = (history.NAME, MODEL, USAGE, CLIENTS, LR, OUTCOME)  # what `fedspan.load` reads
UNFINISHED = (CHECKPOINT, BEST)  # which a finished run keeps only to go on
OPTIONAL = (TABLE, *UNFINISHED)  # nothing reads them as the record, so that they may be added later
COVERED = (*READ, AUDIT, TRAFFIC, SPEC, ROSTER, *OPTIONAL)
STATUS = re.compile(r"(finished|interrupted)$|(stopped|diverged) at round \d+")
FILE = re.compile(r"(seed-\d+/)?[\w.-]+")
FORM = {"seeds": list[int], "statuses": list[str], "files": dict[str, str]}
MORE = {
    "run": str, "rounds": int, "model_rounds": dict[str, int], "decisions": dict[str, Any], "identity": str,
    "spec": dict[str, Any], "signature": dict[str, str],
}  # fmt: skip


def seed_dirs(run_dir: Path, seeds: Sequence[int]) -> list[Path]:
    """The directories of a run's seeds: the run directory itself for one, `seed-*` below it for several."""
    return [run_dir] if len(seeds) == 1 else [run_dir / f"seed-{seed}" for seed in seeds]


def write_outcome(
    run_dir: Path,
    result: Result,
    about: Mapping[str, Any] | None = None,
    *,
    key: Any = None,
    keeps: bool = False,
) -> None:
    """Writes how the models of a run that has ended are used, and its card; a run without one is unfinished.

    Args:
        run_dir: The directory of the run.
        result: What it came to.
        about: What else the card says.
        key: The private key to sign with, or None.
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
    if key is not None:
        public = key.public_key().public_bytes_raw().hex()
        value = key.sign(_signed(card)).hex()
        card["signature"] = {"algorithm": "ed25519", "public_key": public, "value": value}
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
    if "signature" in card and find_spec("cryptography") and not _valid(card):
        wrong.append(f"the signature of {str(run_dir / OUTCOME)!r} does not belong to it")
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


def signing_key() -> Any:
    """The private key that the environment names; None where it names none."""
    named = os.environ.get(KEY)
    if not named:
        return None
    needs("privacy", "cryptography")
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(Path(named).read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise SpecError(
            f"{KEY} names {named!r}, which cannot be read as a private key ({one_line(error, 80)})"
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise SpecError(
            f"{KEY} names {named!r}, which is no Ed25519 key; openssl genpkey -algorithm ed25519 makes one"
        )
    return key


def public_key(path: Path) -> str:
    """A public key from a PEM file, as a card holds it."""
    needs("privacy", "cryptography")
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        return str(load_pem_public_key(path.read_bytes()).public_bytes_raw().hex())  # type: ignore[union-attr]
    except (OSError, ValueError, AttributeError) as error:
        raise SpecError(
            f"{str(path)!r} cannot be read as an Ed25519 public key ({one_line(error, 80)})"
        ) from None


def fingerprint(public: str) -> str:
    """What people compare of a public key: a hash of its 32 bytes."""
    return hashlib.sha256(bytes.fromhex(public)).hexdigest()[:32]


def signed_by(card: Table) -> str:
    """The public key of a card's signature, whether valid or not; "" if it has none."""
    signature = card.get("signature")
    found = signature.get("public_key") if isinstance(signature, dict) else None
    return found if isinstance(found, str) and re.fullmatch("[0-9a-f]{64}", found) else ""


def _valid(card: Table) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(card["signature"]["public_key"]))
        public.verify(bytes.fromhex(card["signature"]["value"]), _signed(card))
    except (InvalidSignature, ValueError, KeyError, TypeError):
        return False
    return True


def _signed(card: Table) -> bytes:
    """What is signed: all of a card but its signature."""
    signed = {key: value for key, value in card.items() if key != "signature"}
    return json.dumps(signed, sort_keys=True).encode()
