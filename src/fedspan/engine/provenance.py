"""How a run ended: the files of its directory, `result.json` with their checksums, and the card of its model.

The card is `provenance.json` beside `model.safetensors`, signed where there is a key. It names the model by its hash,
says how it was trained, on which data and with which result, and holds the last hash of the audit trail and the hashes
of all other files of the run. `fedspan.load` and `fedspan report` refuse a run of which a file that they read is not
that of its card. The environment variable FEDSPAN_SIGN_KEY names an Ed25519 private key in a PEM file:

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

from fedspan.core.digest import digest_of_file
from fedspan.core.errors import ChangedError, CheckpointError, SpecError, one_line
from fedspan.core.extras import needs, versions
from fedspan.core.files import write_atomic
from fedspan.core.json_log import REMEDY, read_table, table_text, write_table
from fedspan.core.spec import Spec, Table
from fedspan.engine import history
from fedspan.engine.loop import Loop

if TYPE_CHECKING:
    from fedspan.engine.result import Result

MODEL, SPEC = "model.safetensors", "spec.toml"
OUTCOME, CHECKPOINT = "result.json", "checkpoint.safetensors"
CLIENTS = "per_client.jsonl"
TRAFFIC = "clients.csv"  # bytes of each client
AUDIT = "audit.jsonl"  # who took part when
LR = "lr.json"  # how the step size was found
TRIALS = "lr-trials.json"  # the finished trials of a search that was interrupted
BEST = "best.safetensors"  # the best model so far of an unfinished run
TABLE = "history.csv"  # the evaluations, by the callback `csv`
ROSTER = "roster.json"  # of a server: which node each client belongs to
STATUS = re.compile(r"(finished|interrupted)$|(stopped|diverged) at round \d+")
OUTCOME_FORM = {"seeds": list[int], "statuses": list[str], "files": dict[str, str]}
CHECKPOINT_FORM = {
    "decisions": dict[str, Any], "identity": str, "seeds": list[int], "round": int, "history": list[list[Any]],
}  # fmt: skip
OUTCOME_MORE = {
    "model_rounds": dict[str, int], "audit": dict[str, str], "decisions": dict[str, Any], "identity": str,
}  # fmt: skip
CARD = "provenance.json"
KEY = "FEDSPAN_SIGN_KEY"
ABOVE = "../"  # before the name of a file that the seeds of a run share
READ = (
    history.NAME,
    CLIENTS,
    LR,
    OUTCOME,
)  # what `load` reads beside the model, which the last one covers
COVERED = (*READ, TRAFFIC, SPEC, ROSTER)
UNFINISHED = (CHECKPOINT, BEST)  # which a finished run may keep
OPTIONAL = (TABLE, *UNFINISHED)  # nothing reads them as the record, so that they may be added later
CARD_FORM = {
    "model": dict[str, str], "run": str, "start": str, "seed": int, "seeds": list[int], "status": str, "rounds": int,
    "audit": dict[str, str], "identity": str, "spec": dict[str, Any], "files": dict[str, str],
}  # fmt: skip
CHANGED, ADDED = "it was changed after the run", "was added after the run"


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
    sums = {}
    for folder in seed_dirs(run_dir, seeds):
        for path in (folder / history.NAME, folder / MODEL, folder / CLIENTS):
            if path.exists():
                sums[path.relative_to(run_dir).as_posix()] = digest_of_file(path)
    ended = {"seeds": list(seeds), "statuses": list(statuses), "files": sums}
    return table_text({**ended, **(about or {})})


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
        if not (run_dir / name).exists() or digest_of_file(run_dir / name) != checksum:
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


def sha256(path: Path) -> str:
    """The hash of a file, as sha256sum prints it."""
    return digest_of_file(path, "sha256")


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


def write_cards(
    loop: Loop, spec: Spec, result: Result, start: str, trails: dict[str, str], key: Any, outcome: bytes,
    *, seeds: tuple[int, ...], keeps: bool,
) -> None:  # fmt: skip
    """Writes the card of every seed's model.

    Args:
        loop: The run.
        spec: Its settings.
        result: What it came to.
        start: A hash of the initial weights.
        trails: The last hash of each seed's audit trail.
        key: The private key to sign with, or None.
        outcome: The text of `result.json`, which is written after the cards.
        seeds: All seeds, if each has a run directory of its own; empty if they share this one.
        keeps: Whether the checkpoint stays.
    """
    assert loop.run_dir is not None
    above = loop.run_dir.parent if seeds else loop.run_dir
    names = [
        name
        for name in (*COVERED, *OPTIONAL)
        if name != OUTCOME and (keeps or name not in UNFINISHED)
    ]
    folders = seed_dirs(loop.run_dir, loop.seeds)
    for number, (folder, trail) in enumerate(zip(folders, trails.items(), strict=True)):
        seed, last = loop.seeds[number], result.runs[number][-1]
        files = {name: sha256(folder / name) for name in names if (folder / name).exists()}
        if folder != above:
            shared = [name for name in names if (above / name).exists()]
            files |= {ABOVE + name: sha256(above / name) for name in shared}
        place = OUTCOME if folder == loop.run_dir else ABOVE + OUTCOME
        card: Table = {
            "model": {"file": MODEL, "sha256": sha256(folder / MODEL)},
            "run": loop.id,
            "start": start,
            "seed": seed,
            "seeds": list(seeds or loop.seeds),
            "status": result.statuses[number],
            "rounds": loop.t,
            "model_round": result.model_rounds.get(seed, loop.t),
            "metrics": {name: value for name, value in last.items() if name != "events"},
            **({"epsilon": last["epsilon"]} if "epsilon" in last else {}),
            "audit": dict(zip(("file", "last_hash"), trail, strict=True)),
            "identity": spec.identity(),
            "data": spec.decisions().get("task", {}),
            "spec": spec.table(),
            "versions": versions(),
            "files": files | {place: hashlib.sha256(outcome).hexdigest()},
        }
        if key is not None:
            public = key.public_key().public_bytes_raw().hex()
            value = key.sign(_signed(card)).hex()
            card["signature"] = {"algorithm": "ed25519", "public_key": public, "value": value}
        write_table(folder / CARD, card)


def read_card(folder: Path) -> tuple[Table, list[str]]:
    """(the card, what is wrong with it or with the files that it names)."""
    card = _card(folder)
    wrong = _changes(folder, card, (*COVERED, *OPTIONAL))
    if not _is(folder / MODEL, card["model"].get("sha256")):
        wrong.append(f"{str(folder / MODEL)!r} is not the model of the card")
    if "signature" in card:
        needs("privacy", "cryptography")
        wrong += [] if _valid(card) else [_not_signed(folder)]
    return card, wrong


def check_run(run_dir: Path, folders: Sequence[Path]) -> list[Table]:
    """How the seeds of a run ended; raises where a file that `fedspan.load` reads is not as the run left it.

    Args:
        run_dir: The directory of the run.
        folders: Those of its seeds; itself, if there is one seed.
    """
    ends = [end for folder in folders if (end := read_outcome(folder))]
    if run_dir not in folders:
        whole = read_outcome(run_dir)
        ends += (
            [whole] if whole and len(ends) < len(folders) else []
        )  # seeds of one computation have one file
    cards = {folder: _card(folder) for folder in folders if (folder / CARD).exists()}
    wrong = list[str]()
    for folder, card in cards.items():
        place = folder if OUTCOME in card["files"] else folder.parent
        ended = (place / OUTCOME).exists()  # it is written after the card, and covers the model
        wrong += _changes(
            folder, card, READ if ended else [name for name in READ if name != OUTCOME]
        )
        if not ended and not _is(folder / MODEL, card["model"].get("sha256")):
            wrong.append(f"{str(folder / MODEL)!r} is not the model of the card")
        if "signature" in card and find_spec("cryptography") and not _valid(card):
            wrong.append(_not_signed(folder))
    if cards and run_dir not in folders:
        known = {f"seed-{seed}" for card in cards.values() for seed in card["seeds"]}
        shared = {
            name.removeprefix(ABOVE)
            for card in cards.values()
            for name in card["files"]
            if ABOVE in name
        }
        wrong += [f"{str(one)!r} {ADDED}" for one in folders if one.name not in known]
        others = [run_dir / name for name in READ if name not in (*shared, OUTCOME)]
        wrong += [f"{str(one)!r} {ADDED}" for one in others if one.exists()]
    elif any(len(end["seeds"]) > 1 for end in ends if run_dir in folders):
        wrong.append(f"{str(run_dir / history.NAME)!r} {ADDED}")
    if wrong:
        raise ChangedError(f"{wrong[0]}; put back what the run has written, or run again")
    return ends


def _card(folder: Path) -> Table:
    return read_table(
        folder / CARD, CARD_FORM, {"signature": dict[str, str], "epsilon": float | None}, CHANGED
    )


def _changes(folder: Path, card: Table, names: Sequence[str]) -> list[str]:
    """What is wrong with the files of these names."""
    wrong = []
    for name, digest in card["files"].items():
        path = (folder.parent if name.startswith(ABOVE) else folder) / Path(name).name
        if path.name in names and not _is(path, digest):
            wrong.append(
                f"{str(path)!r} is missing"
                if not path.exists()
                else f"{str(path)!r} was changed after the run"
            )
    others = [name for name in names if name not in card["files"] and name not in OPTIONAL]
    return wrong + [
        f"{str(folder / name)!r} {ADDED}" for name in others if (folder / name).exists()
    ]


def _is(path: Path, digest: Any) -> bool:
    return path.is_file() and sha256(path) == digest


def _not_signed(folder: Path) -> str:
    return f"the signature of {str(folder / CARD)!r} does not belong to it"


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
    return json.dumps(
        {key: value for key, value in card.items() if key != "signature"}, sort_keys=True
    ).encode()
