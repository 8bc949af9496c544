"""The model card of a finished run: `provenance.json` beside `model.safetensors`, signed where there is a key.

It names the model by its hash, says how it was trained, on which data and with which result, and holds the last hash of
the audit trail and the hashes of all other files of the run. `fedspan.load` and `fedspan report` refuse a run of which
a file that they read is not that of its card. The environment variable FEDSPAN_SIGN_KEY names an Ed25519 private key in
a PEM file:

    openssl genpkey -algorithm ed25519 -out sign.pem
    openssl pkey -in sign.pem -pubout -out sign.pub
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedspan.core.errors import ChangedError, SpecError, one_line
from fedspan.core.extras import needs
from fedspan.core.sealed import read_table, write_table
from fedspan.core.spec import Spec, Table
from fedspan.core.versions import versions
from fedspan.engine import history
from fedspan.engine.loop import Loop
from fedspan.engine.outcome import (
    BEST,
    CHECKPOINT,
    CLIENTS,
    LR,
    MODEL,
    OUTCOME,
    ROSTER,
    ROUNDS,
    SPEC,
    TABLE,
    TRAFFIC,
    read_outcome,
    seed_dirs,
)

if TYPE_CHECKING:
    from fedspan.engine.result import Result

CARD = "provenance.json"
KEY = "FEDSPAN_SIGN_KEY"
ABOVE = "../"  # before the name of a file that the seeds of a run share
READ = (
    history.NAME,
    CLIENTS,
    LR,
    OUTCOME,
)  # what `fedspan.load` reads, beside the model, which the last one covers
COVERED = (*READ, TRAFFIC, SPEC, ROSTER, ROUNDS)
UNFINISHED = (CHECKPOINT, BEST)  # which a finished run may keep
OPTIONAL = (TABLE, *UNFINISHED)  # nothing reads them as the record, so that they may be added later
CARD_FORM = {
    "model": dict[str, str], "run": str, "start": str, "seed": int, "seeds": list[int], "status": str, "rounds": int,
    "audit": dict[str, str], "identity": str, "spec": dict[str, Any], "files": dict[str, str],
}  # fmt: skip
CHANGED, ADDED = "it was changed after the run", "was added after the run"


def sha256(path: Path) -> str:
    """The hash of a file, as sha256sum prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
    for number, (folder, trail) in enumerate(
        zip(seed_dirs(loop.run_dir, loop.seeds), trails.items(), strict=True)
    ):
        seed, last = loop.seeds[number], result.runs[number][-1]
        card: Table = {
            "model": {"file": MODEL, "sha256": sha256(folder / MODEL)},
            "run": loop.id,
            "start": start,
        }
        card |= {
            "seed": seed,
            "seeds": list(seeds or loop.seeds),
            "status": result.statuses[number],
            "rounds": loop.t,
        }
        card |= {"model_round": result.model_rounds.get(seed, loop.t)}
        card |= {"metrics": {name: value for name, value in last.items() if name != "events"}}
        card |= {"epsilon": last["epsilon"]} if "epsilon" in last else {}
        card |= {
            "audit": dict(zip(("file", "last_hash"), trail, strict=True)),
            "identity": spec.identity(),
        }
        card |= {
            "data": spec.decisions().get("task", {}),
            "spec": spec.table(),
            "versions": versions(),
        }
        files = {name: sha256(folder / name) for name in names if (folder / name).exists()}
        if folder != above:
            files |= {
                ABOVE + name: sha256(above / name) for name in names if (above / name).exists()
            }
        files[OUTCOME if folder == loop.run_dir else ABOVE + OUTCOME] = hashlib.sha256(
            outcome
        ).hexdigest()
        card |= {"files": files}
        write_table(
            folder / CARD, card if key is None else card | {"signature": _signature(card, key)}
        )


def _signature(card: Table, key: Any) -> Table:
    public = key.public_key().public_bytes_raw().hex()
    return {"algorithm": "ed25519", "public_key": public, "value": key.sign(_signed(card)).hex()}


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
