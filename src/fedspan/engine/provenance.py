"""The model card of a finished run: `provenance.json` beside `model.safetensors`, signed where there is a key.

It names the model by its hash, says how it was trained, on which data and with which result, and holds the last hash of
the audit trail. The environment variable FEDSPAN_SIGN_KEY names an Ed25519 private key in a PEM file:

    openssl genpkey -algorithm ed25519 -out sign.pem
    openssl pkey -in sign.pem -pubout -out sign.pub
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from fedspan.core.errors import SpecError, one_line
from fedspan.core.extras import needs
from fedspan.core.sealed import check_form, read_table, write_table
from fedspan.core.spec import Spec, Table
from fedspan.core.versions import versions
from fedspan.engine.loop import Loop
from fedspan.engine.outcome import MODEL, seed_dirs
from fedspan.engine.result import Result

CARD = "provenance.json"
KEY = "FEDSPAN_SIGN_KEY"


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
        raise SpecError(f"{KEY} names {named!r}, which is no Ed25519 key; openssl genpkey -algorithm ed25519 makes one")
    return key


def public_key(path: Path) -> str:
    """A public key from a PEM file, as a card holds it."""
    needs("privacy", "cryptography")
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        return str(load_pem_public_key(path.read_bytes()).public_bytes_raw().hex())  # type: ignore[union-attr]
    except (OSError, ValueError, AttributeError) as error:
        raise SpecError(f"{str(path)!r} cannot be read as an Ed25519 public key ({one_line(error, 80)})") from None


def fingerprint(public: str) -> str:
    """What people compare of a public key: a hash of its 32 bytes."""
    return hashlib.sha256(bytes.fromhex(public)).hexdigest()[:32]


def write_cards(loop: Loop, spec: Spec, result: Result, start: str, trails: dict[str, str], key: Any) -> None:
    """Writes the card of every seed's model; `trails` has the last hash of each seed's audit trail."""
    assert loop.run_dir is not None
    for number, (folder, trail) in enumerate(zip(seed_dirs(loop.run_dir, loop.seeds), trails.items(), strict=True)):
        seed, last = loop.seeds[number], result.runs[number][-1]
        card: Table = {"model": {"file": MODEL, "sha256": sha256(folder / MODEL)}, "run": loop.id, "start": start}
        card |= {"seed": seed, "status": result.statuses[number], "rounds": loop.t}
        card |= {"model_round": result.model_rounds.get(seed, loop.t)}
        card |= {"metrics": {name: value for name, value in last.items() if name != "events"}}
        card |= {"epsilon": last["epsilon"]} if "epsilon" in last else {}
        card |= {"audit": dict(zip(("file", "last_hash"), trail, strict=True)), "identity": spec.identity()}
        card |= {"data": spec.decisions().get("task", {}), "spec": spec.table(), "versions": versions()}
        write_table(folder / CARD, card if key is None else card | {"signature": _signature(card, key)})


def _signature(card: Table, key: Any) -> Table:
    public = key.public_key().public_bytes_raw().hex()
    return {"algorithm": "ed25519", "public_key": public, "value": key.sign(_signed(card)).hex()}


def read_card(folder: Path) -> tuple[Table, list[str]]:
    """(the card, what is wrong with it or with the model that it names)."""
    card = read_table(folder / CARD, "it was changed after the run")
    check_form(card, {"model": dict[str, str], "audit": dict[str, str]}, folder / CARD, {"signature": dict[str, str]})
    for part, key in (("model", "sha256"), ("audit", "last_hash")):
        check_form(card[part], {key: str}, folder / CARD)
    check_form(card.get("signature", {"public_key": ""}), {"public_key": str}, folder / CARD)
    wrong = []
    model = folder / MODEL
    if not model.exists() or sha256(model) != card["model"]["sha256"]:
        wrong.append(f"{str(model)!r} is not the model of the card")
    if "signature" in card and not _valid(card):
        wrong.append(f"the signature of {str(folder / CARD)!r} does not belong to it")
    return card, wrong


def _valid(card: Table) -> bool:
    needs("privacy", "cryptography")
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
    return json.dumps({key: value for key, value in card.items() if key != "signature"}, sort_keys=True).encode()
