"""Who a client is: long-term keys that the clients themselves know, so that the server cannot pose as any of them.

Without them the server relays the keys of a session and could put its own in their place. With them each client signs
its keys, and the others check the signature against their own list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fedspan.core.errors import ProtocolError, SpecError

SIGNATURE = 64  # bytes
MAKE_KEY = "make one with ssh-keygen -t ed25519 -N ''"


@dataclass(frozen=True, eq=False)
class Identity:
    """A client's own key, and the public keys of all clients."""

    private: Ed25519PrivateKey
    roster: Mapping[int, Ed25519PublicKey]

    @staticmethod
    def read(key: Path, roster: Path) -> Identity:
        """From a private key of OpenSSH, and a file with one line per client: its number and its public key."""
        try:
            private = load_ssh_private_key(key.read_bytes(), None)
        except OSError as error:
            raise SpecError(f"identity-key {str(key)!r} cannot be read: {error.strerror}") from None
        except (ValueError, TypeError, UnsupportedAlgorithm):
            private = None
        if not isinstance(private, Ed25519PrivateKey):
            raise SpecError(
                f"identity-key {str(key)!r} is not an Ed25519 key without password; {MAKE_KEY}"
            )
        return Identity(private, read_roster(roster))

    def sign(self, keys: bytes, session: bytes, client: int) -> bytes:
        """The signature of a client's keys in a session."""
        return self.private.sign(_statement(keys, session, client))

    def check(self, keys: bytes, signature: bytes, session: bytes, client: int) -> None:
        """Raises unless the client of the roster has signed these keys for the session."""
        known = self.roster.get(client)
        if known is None:
            raise ProtocolError(f"client {client} is not in this client's roster")
        try:
            known.verify(signature, _statement(keys, session, client))
        except InvalidSignature:
            raise ProtocolError(
                f"the keys of client {client} are not signed with its key in the roster"
            ) from None


def read_roster(path: Path) -> dict[int, Ed25519PublicKey]:
    """Client → public key, from lines such as `3 ssh-ed25519 AAAA… ward-3`."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        raise SpecError(
            f"roster {str(path)!r} cannot be read; give a file with one line per client"
        ) from None
    found: dict[int, Ed25519PublicKey] = {}
    for line in lines:
        number, _, key = line.strip().partition(" ")
        if not number or number.startswith("#"):
            continue
        try:
            public = load_ssh_public_key(key.strip().encode())
        except (ValueError, UnsupportedAlgorithm):
            public = None
        if (
            not number.isdecimal()
            or int(number) in found
            or not isinstance(public, Ed25519PublicKey)
        ):
            raise SpecError(
                f"roster {str(path)!r} has the line {line[:60]!r}; write a client's number once, and its Ed25519 "
                "public key as in its .pub file"
            )
        found[int(number)] = public
    return found


def _statement(keys: bytes, session: bytes, client: int) -> bytes:
    return f"fedspan secure sum 2 keys {session.hex()} {client} ".encode() + keys
