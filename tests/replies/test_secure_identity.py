"""Signed keys: a server cannot pose as a client."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip(
    "cryptography", reason="cryptography is not installed; pip install 'fedspan[privacy]'"
)

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from fedspan.core.errors import ProtocolError, SpecError
from fedspan.core.privacy import Privacy
from fedspan.replies.secure import client as secure_client
from fedspan.replies.secure.client import Member
from fedspan.replies.secure.identity import Identity
from support.secure import at, identities, real, session

SIGNED = Privacy(secure=True, secure_signed=True)


def test_signed_keys_give_the_same_sum() -> None:
    one, _ = session({i: np.full(4, float(i)) for i in range(5)}, SIGNED, {"train": {2}})
    survivors, total = one.run()
    assert survivors == [0, 1, 3, 4]
    assert real(total, one.fixed) == [8.0] * 4


@pytest.mark.parametrize("who", ["a stranger", "another client", "nobody"])
def test_a_server_cannot_pose_as_a_client(who: str) -> None:
    """It replaces the keys of client 1 by its own, signed with whatever key it has; every client refuses."""
    sessions, messages, local = at("shares", SIGNED)
    forger = {
        "a stranger": identities([1])[1],
        "another client": local.identities[3],
        "nobody": None,
    }[who]
    named = {"secure.session": messages[0]["secure.session"]}
    begun, answer = secure_client.advertise(named, Member(1, Privacy(secure=True)))
    row = answer["keys"].numpy().tobytes()
    row += bytes(64) if forger is None else forger.sign(row, begun.id.numpy().tobytes(), 1)
    keys = messages[0]["secure.keys"].clone()
    keys[1] = secure_client.to_tensor(row)
    local.sessions[0] = sessions[0]
    with pytest.raises(
        ProtocolError, match="keys of client 1 are not signed with its key in the roster"
    ):
        local.ask("shares", {0: messages[0] | {"secure.keys": keys}}, {})


def test_signed_keys_of_an_earlier_session_with_the_same_name_are_of_no_use() -> None:
    """The server repeats a session's name and client 1's signed keys of it; nobody can seal shares with them."""
    _, messages, local = at("shares", SIGNED)
    asked, old = messages[0], messages[0]["secure.keys"]
    named = {"secure.session": asked["secure.session"]}
    fresh = {c: local._answer("keys", c, named, {})["keys"] for c in range(5)}
    keys = torch.stack([old[1] if c == 1 else fresh[c] for c in range(5)])
    sealed = {
        c: local._answer("shares", c, asked | {"secure.keys": keys}, {})["shares"]
        for c in (0, 2, 3, 4)
    }
    forged = torch.zeros(94, dtype=torch.uint8)
    to_0 = torch.stack([sealed[c][0] if c in sealed else forged for c in range(5)])
    relayed = {
        "secure.session": asked["secure.session"],
        "secure.sharers": torch.arange(5),
        "secure.shares": to_0,
    }
    with pytest.raises(ProtocolError, match="did not seal its shares"):
        secure_client.mask(local.sessions[0], relayed, np.ones(4, np.uint32))


def test_a_client_without_an_identity_or_outside_the_roster(tmp_path: Path) -> None:
    message = {"secure.session": torch.zeros(16, dtype=torch.uint8)}
    with pytest.raises(ProtocolError, match="needs identity-key and roster"):
        secure_client.advertise(message, Member(0, SIGNED))
    with pytest.raises(ProtocolError, match="client 7 is not in this client's roster"):
        identities([1])[1].check(b"", b"", b"", 7)


def test_an_identity_is_read_from_openssh_files(tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    (tmp_path / "key").write_bytes(private)
    (tmp_path / "roster").write_text(f"# the wards\n3 {public} ward-3\n\n4 {public}\n")
    one = Identity.read(tmp_path / "key", tmp_path / "roster")
    one.check(b"keys", one.sign(b"keys", b"s", 3), b"s", 3)
    with pytest.raises(ProtocolError, match="not signed"):
        one.check(b"keys", one.sign(b"keys", b"s", 4), b"s", 3)
    for text in ("x ssh-ed25519 AAAA", f"3 {public}\n3 {public}", f"{public}", "3 ssh-rsa AAAA"):
        (tmp_path / "bad").write_text(text)
        with pytest.raises(SpecError, match="has the line"):
            Identity.read(tmp_path / "key", tmp_path / "bad")
    with pytest.raises(SpecError, match="cannot be read"):
        Identity.read(tmp_path / "none", tmp_path / "roster")
    with pytest.raises(SpecError, match="ssh-keygen -t ed25519"):
        Identity.read(tmp_path / "roster", tmp_path / "roster")
