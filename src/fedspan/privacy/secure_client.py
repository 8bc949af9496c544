"""A client's part of a secure sum (Bonawitz et al. 2017, eprint 2017/281): four questions, each answered once.

     1  keys     draw two key pairs and the seed of a self mask; send the public keys and a commitment to the seed
     2  shares   check the others' keys; cut the mask's private key and the seed into shares, t of n, and send one of
                 each, sealed, to every client
     3  train    send the reply as whole numbers + self mask ± one mask for each client that sent shares
     4  unmask   of each client send one share: of its seed if its reply arrived, of its key if not

Nobody is ever given both shares of a client: the fourth question is answered once per session, for one list of
survivors. A new session draws everything anew. The functions are pure: whoever keeps a `Session` must store the new one
before the answer leaves the machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from fedspan.core.errors import ProtocolError
from fedspan.core.privacy import Privacy
from fedspan.core.wire import Arrays
from fedspan.privacy.secure_identity import SIGNATURE, Identity
from fedspan.privacy.secure_keys import (
    KEY,
    NONCE,
    SESSION,
    TAG,
    agreed_key,
    commitment,
    new_key,
    public_key,
    seal,
    unseal,
)
from fedspan.privacy.secure_masks import Numbers, add_mask
from fedspan.privacy.secure_numbers import FixedPoint
from fedspan.privacy.secure_shares import SHARE, split

PHASES = ("keys", "shares", "train", "unmask")
SEALED = NONCE + 2 * SHARE + TAG  # bytes of the two shares that one client sends to another
UNREADABLE = b"\xff" * SHARE  # in place of a share that did not arrive intact
NAMED = "secure."  # prefix of the arrays of the protocol, next to those of a download


def _none() -> torch.Tensor:
    return torch.zeros(0, dtype=torch.uint8)


@dataclass(frozen=True, eq=False)
class Session:
    """What a client keeps between two questions of a session."""

    answered: int  # of the four questions
    id: torch.Tensor
    client: int
    private: torch.Tensor = field(default_factory=_none)  # (3, 32): two private keys and a seed
    threshold: int = 0
    clients: torch.Tensor = field(default_factory=_none)  # that sent keys
    keys: torch.Tensor = field(default_factory=_none)  # (clients, 96 or 160): public keys, commitment, signature
    sharers: torch.Tensor = field(default_factory=_none)  # that sent shares
    shares: torch.Tensor = field(default_factory=_none)  # (sharers, SEALED): what they sent to this client

    def expects(self, phase: str, message: Arrays) -> None:
        """Raises unless this question is the next one of the session."""
        if not torch.equal(self.id, _bytes_in(message, "session", (SESSION,))):
            raise ProtocolError("the question is of another session; a new one begins with keys")
        if (number := PHASES.index(phase)) != self.answered:
            answered = "has been answered" if number < self.answered else "comes too early"
            raise ProtocolError(f"the question {phase!r} of the session {answered}; it is answered once, in its turn")

    def key(self, other: int, purpose: str) -> bytes:
        """What this client agreed on with another one: for shares from or to it, or for the mask of the two."""
        mine, pair = int(purpose == "mask"), (min(self.client, other), max(self.client, other))
        theirs = self.keys[self.clients.tolist().index(other), mine * KEY : (mine + 1) * KEY]
        clients = {"mask": pair, "to": (self.client, other), "from": (other, self.client)}[purpose]
        kind = "mask" if purpose == "mask" else "shares"
        return agreed_key(to_bytes(self.private[mine]), to_bytes(theirs), kind, to_bytes(self.id), *clients)

    def opened(self) -> list[bytes]:
        """The two shares that each client sent to this one."""
        pairs = zip(self.shares, self.sharers.tolist(), strict=True)
        return [unseal(self.key(other, "from"), to_bytes(sealed)) or UNREADABLE * 2 for sealed, other in pairs]


def _needed(identity: Identity | None) -> Identity:
    if identity is None:
        raise ProtocolError("`privacy.secure_signed` needs identity-key and roster in the config of this client's node")
    return identity


def width(privacy: Privacy) -> int:
    """Bytes of what a client announces: two public keys, a commitment, and a signature of these."""
    return 3 * KEY + SIGNATURE * privacy.secure_signed


def advertise(message: Arrays, client: int, privacy: Privacy, identity: Identity | None) -> tuple[Session, Arrays]:
    """The first question: begins a session."""
    session = _bytes_in(message, "session", (SESSION,))
    private = [new_key() for _ in range(3)]
    public = public_key(private[0]) + public_key(private[1]) + commitment(private[2], to_bytes(session), client)
    if privacy.secure_signed:
        public += _needed(identity).sign(public, to_bytes(session), client)
    return Session(1, session, client, to_tensor(b"".join(private)).reshape(3, KEY)), {"keys": to_tensor(public)}


def share(session: Session, message: Arrays, privacy: Privacy, identity: Identity | None) -> tuple[Session, Arrays]:
    """The second question: who takes part, by which keys."""
    session.expects("shares", message)
    clients = _clients_in(message, "clients")
    keys = _bytes_in(message, "keys", (len(clients), width(privacy)))
    threshold = _whole(message, "threshold")
    if len(np.unique(keys.numpy(), axis=0)) < len(clients):
        raise ProtocolError("two clients have the same keys")
    if session.client not in clients:
        raise ProtocolError("this client is not among those of the session")
    own = to_bytes(session.private[0]), to_bytes(session.private[1])
    if to_bytes(keys[clients.index(session.client), : 2 * KEY]) != b"".join(map(public_key, own)):
        raise ProtocolError("the keys of this client were changed")
    if not privacy.survivors(len(clients)) <= threshold <= len(clients):
        raise ProtocolError(f"the threshold is {threshold} of {len(clients)} clients, outside what the settings allow")
    FixedPoint.of(privacy).check(len(clients))
    if privacy.secure_signed:
        for client, row in zip(clients, map(to_bytes, keys), strict=True):
            _needed(identity).check(row[: 3 * KEY], row[3 * KEY :], to_bytes(session.id), client)
    session = replace(session, answered=2, threshold=threshold, clients=torch.tensor(clients), keys=keys)
    points = [client + 1 for client in clients]
    both = zip(*(split(to_bytes(session.private[part]), threshold, points) for part in (2, 1)), strict=True)
    sealed = [seal(session.key(to, "to"), seed + key) for to, (seed, key) in zip(clients, both, strict=True)]
    return session, {"shares": to_tensor(b"".join(sealed)).reshape(-1, SEALED)}


def mask(session: Session, message: Arrays, numbers: Numbers) -> tuple[Session, Arrays]:
    """The third question: the reply in whole numbers, which this changes to the masked ones.

    Signed keys of an earlier session could be sent again by the server. But only who holds the private key can seal a
    share for this client's new key, so with signed keys every share must open.
    """
    session.expects("train", message)
    sharers = _clients_in(message, "sharers")
    shares = _bytes_in(message, "shares", (len(sharers), SEALED))
    _check_those(sharers, session.clients.tolist(), session)
    session = replace(session, answered=3, sharers=torch.tensor(sharers), shares=shares)
    if session.keys.shape[1] > 3 * KEY and UNREADABLE * 2 in session.opened():
        raise ProtocolError("a client did not seal its shares with the keys that it signed")
    for other in sharers:
        if other != session.client:
            add_mask(numbers, session.key(other, "mask"), 1 if session.client < other else -1)
    add_mask(numbers, to_bytes(session.private[2]))
    return session, {"masked": torch.from_numpy(numbers.view(f"i{numbers.itemsize}"))}


def unmask(session: Session, message: Arrays) -> tuple[Session, Arrays]:
    """The fourth question: whose replies arrived. Ends the session; all its secrets are dropped."""
    session.expects("unmask", message)
    survivors = _clients_in(message, "survivors")
    _check_those(survivors, session.sharers.tolist(), session)
    pairs = zip(session.opened(), session.sharers.tolist(), strict=True)
    answers = [opened[:SHARE] if other in survivors else opened[SHARE:] for opened, other in pairs]
    return Session(4, session.id, session.client), {"shares": to_tensor(b"".join(answers)).reshape(-1, SHARE)}


def _check_those(chosen: list[int], known: list[int], session: Session) -> None:
    if session.client not in chosen or not set(chosen) <= set(known):
        raise ProtocolError("the list of clients is not one of the session's")
    if len(chosen) < session.threshold:
        raise ProtocolError(f"{len(chosen)} clients are left, fewer than the threshold of {session.threshold}")


def to_bytes(array: torch.Tensor) -> bytes:
    """An array of bytes as bytes."""
    return array.numpy().tobytes()


def to_tensor(text: bytes) -> torch.Tensor:
    """Bytes as an array."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _array(message: Arrays, name: str, dtype: torch.dtype) -> torch.Tensor:
    found = message.get(NAMED + name)
    if found is None or found.dtype != dtype:
        raise ProtocolError(f"the message has no array {NAMED + name!r} of type {dtype}")
    return found


def _bytes_in(message: Arrays, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    found = _array(message, name, torch.uint8)
    if found.shape != shape:
        raise ProtocolError(f"array {NAMED + name!r} has shape {tuple(found.shape)!s:.40}, expected {shape}")
    return found


def _clients_in(message: Arrays, name: str) -> list[int]:
    found: list[int] = _array(message, name, torch.int64).reshape(-1).tolist()
    if found != sorted(set(found)) or (found and found[0] < 0):
        raise ProtocolError(f"array {NAMED + name!r} must name clients in order, each once")
    return found


def _whole(message: Arrays, name: str) -> int:
    found = _array(message, name, torch.int64)
    if found.numel() != 1:
        raise ProtocolError(f"array {NAMED + name!r} must hold one number")
    return int(found)
