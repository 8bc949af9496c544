"""A client's part of a secure sum (Bonawitz et al. 2017, eprint 2017/281): four questions, each answered once.

     1  keys     draw two key pairs and the seed of a self mask; send the public keys, a commitment to the seed and the
                 client's own number of examples
     2  shares   check the others' keys and numbers; cut the mask's private key and the seed into shares, t of n, and
                 send one of each, sealed, to every client
     3  train    send the reply times the client's weight as whole numbers + self mask ± one mask for each client that
                 sent shares
     4  unmask   of each client send one share: of its seed if its reply arrived, of its key if not

Nobody is ever given both shares of a client: the fourth question is answered once per session, for one list of
survivors. A new session draws everything anew. The functions are pure: whoever keeps a `Session` must store the new one
before the answer leaves the machine.

The server does not decide weights: client i counts n_i |R| / Σ_R n_j, by the numbers that the clients of the roster R
have announced themselves. Every key that two clients agree on depends on the whole roster, so that a server that names
different numbers, keys, clients or rounds to two clients gets a sum from which no mask can be removed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedspan.core.errors import ProtocolError
from fedspan.core.privacy import LEAST, Privacy
from fedspan.core.wire import Arrays
from fedspan.replies.fixed_point import FixedPoint, Numbers, shares_of
from fedspan.replies.secure.identity import SIGNATURE
from fedspan.replies.secure.keys import (
    KEY,
    NONCE,
    SESSION,
    TAG,
    add_mask,
    agreed_key,
    commitment,
    new_key,
    public_key,
    seal,
    unseal,
)
from fedspan.replies.secure.shares import SHARE, split

ARRAYS = {  # of each question, in order: bytes, lists of clients, and a threshold
    "keys": ("session",),
    "shares": ("session", "clients", "keys", "threshold"),
    "train": ("session", "sharers", "shares"),
    "unmask": ("session", "survivors"),
}
PHASES, BYTES = tuple(ARRAYS), ("session", "keys", "shares")
COUNT = 8  # bytes of a number of examples
ANNOUNCED = 3 * KEY + COUNT  # two public keys, a commitment, and a number of examples
MOST_EXAMPLES = 1 << 40  # of a client: sums and quotients of such numbers are exact
SEALED = NONCE + 2 * SHARE + TAG  # bytes of the two shares that one client sends to another
UNREADABLE = b"\xff" * SHARE  # in place of a share that did not arrive intact
NAMED = "secure."  # prefix of the arrays of the protocol, next to those of a download
NONE = torch.zeros(0, dtype=torch.uint8)


@dataclass(frozen=True)
class Member:
    """Who answers: a client with settings of its own."""

    client: int
    privacy: Privacy
    identity: Any = None  # an `Identity`, where keys are signed
    examples: int | None = None  # by which it counts; None: all clients count alike
    settings: str = ""  # a fingerprint of all that clients must have in common

    def __post_init__(self) -> None:
        if self.privacy.secure_signed and self.identity is None:
            raise ProtocolError(
                "`privacy.secure_signed` needs identity-key and roster in the config of this client's node"
            )

    def announced(self, session: Session) -> bytes:
        """What this client says of itself at the first question."""
        first, second, seed = map(to_bytes, session.private)
        own = commitment(seed, to_bytes(session.id), self.client)
        examples = 1 if self.examples is None else self.examples
        return public_key(first) + public_key(second) + own + examples.to_bytes(COUNT, "little")


@dataclass(frozen=True, eq=False)
class Session:
    """What a client keeps between two questions of a session."""

    answered: int  # of the four questions
    id: torch.Tensor
    client: int
    round: int
    private: torch.Tensor = NONE  # (3, 32): two private keys and a seed
    threshold: int = 0
    clients: torch.Tensor = NONE  # that sent keys
    keys: torch.Tensor = NONE  # (clients, 104 or 168): what each has announced, its signature
    roster: torch.Tensor = NONE  # a hash of all that the clients must have been told alike
    sharers: torch.Tensor = NONE  # that sent shares
    shares: torch.Tensor = NONE  # (sharers, SEALED): what they sent to this client
    opened_round: int = -1  # the last round whose masks this client helped to remove
    opened: torch.Tensor = NONE  # whose replies were in its sum

    def arrays(self) -> Arrays:
        """Return what a file of the session holds."""
        return {name: torch.as_tensor(value) for name, value in vars(self).items()}

    @staticmethod
    def of(arrays: Arrays) -> Session:
        """Return the session that a file holds."""
        parts: dict[str, Any] = {k: v if v.ndim else int(v) for k, v in arrays.items()}
        return Session(**parts)

    def key(self, purpose: str, sender: int, receiver: int) -> bytes:
        """What this client agreed on with another one: for shares from one to the other, or for the mask of the two."""
        other, mine = receiver if sender == self.client else sender, int(purpose == "mask")
        theirs = self.keys[self.clients.tolist().index(other), mine * KEY : (mine + 1) * KEY]
        own, roster = to_bytes(self.private[mine]), to_bytes(self.roster)
        return agreed_key(own, to_bytes(theirs), purpose, roster, sender, receiver)

    def factor(self) -> float:
        """How much this client counts in the sum; 1 on average over the roster."""
        return float(factors_of(self.keys)[self.clients.tolist().index(self.client)])

    def opened_shares(self) -> list[bytes]:
        """The two shares that each client sent to this one."""
        return [
            unseal(self.key("shares", other, self.client), to_bytes(sealed)) or UNREADABLE * 2
            for sealed, other in zip(self.shares, self.sharers.tolist(), strict=True)
        ]

    def check_those(self, chosen: list[int], known: torch.Tensor) -> None:
        """Raise unless enough of the session's clients are chosen, this one among them."""
        if self.client not in chosen or not set(chosen) <= set(known.tolist()):
            raise ProtocolError("the list of clients is not one of the session's")
        if len(chosen) < self.threshold:
            raise ProtocolError(
                f"{len(chosen)} clients are left, fewer than the threshold of {self.threshold}"
            )


def read(
    phase: str, message: Arrays, current: Session | None = None, wide: int = SEALED
) -> list[Any]:
    """The arrays of a question in the order of `ARRAYS`, each of its form: bytes, or a list of clients.

    Args:
        phase: The question.
        message: The arrays that came with it; those without the prefix are of the download.
        current: The session of which this must be the next question; None for the first one.
        wide: Bytes of a row of its keys or shares.
    """
    own = {name.removeprefix(NAMED): a for name, a in message.items() if name.startswith(NAMED)}
    found: list[Any] = []
    for name in ARRAYS[phase]:
        array, told = own.pop(name, None), f"array {NAMED + name!r}"
        dtype = torch.uint8 if name in BYTES else torch.int64
        if array is None or array.dtype != dtype:
            raise ProtocolError(f"the message has no {told} of type {dtype}")
        if name in BYTES:
            shape = (len(found[1]), wide) if found else (SESSION,)
            if array.shape != shape:
                raise ProtocolError(
                    f"{told} has shape {tuple(array.shape)!s:.40}, expected {shape}"
                )
            found.append(array)
        else:
            numbers = array.reshape(-1).tolist()
            if numbers != sorted(set(numbers)) or min(numbers, default=0) < 0:
                raise ProtocolError(f"{told} must name clients in order, each once")
            found.append(numbers)
        if name != "session" or current is None:
            continue
        if not torch.equal(current.id, array):
            raise ProtocolError("the question is of another session; a new one begins with keys")
        if (number := PHASES.index(phase)) != current.answered:
            answered = "has been answered" if number < current.answered else "comes too early"
            raise ProtocolError(
                f"the question {phase!r} of the session {answered}; it is answered once, in its turn"
            )
    if own:
        raise ProtocolError(f"the question {phase!r} has no array {NAMED + min(own)!r:.60}")
    return found


def width(privacy: Privacy) -> int:
    """Bytes of what a client announces, and of its signature."""
    return ANNOUNCED + SIGNATURE * privacy.secure_signed


def count_in(row: torch.Tensor) -> int:
    """The number of examples in what a client has announced."""
    return int.from_bytes(to_bytes(row[3 * KEY : ANNOUNCED]), "little")


def factors_of(rows: Iterable[torch.Tensor]) -> npt.NDArray[np.float64]:
    """How much each client of a roster counts, by what they have announced."""
    return shares_of(np.array([count_in(row) for row in rows]))


def roster_hash(
    session: bytes, about: str, threshold: int, clients: list[int], keys: torch.Tensor
) -> torch.Tensor:
    """A hash of what every client of a session must be told alike."""
    text = f"fedspan secure sum 2 roster {session.hex()} {about} {threshold} {clients} ".encode()
    return to_tensor(hashlib.sha256(text + to_bytes(keys.contiguous())).digest())


def told(session: Session, member: Member) -> torch.Tensor:
    """A hash of what a client was told of a session that has a roster, and of the settings by which it answers."""
    about, clients = f"{session.round} {member.settings}", session.clients.tolist()
    return roster_hash(to_bytes(session.id), about, session.threshold, clients, session.keys)


def advertise(
    message: Arrays, member: Member, t: int = 0, before: Session | None = None
) -> tuple[Session, Arrays]:
    """The first question: begins a session for round t; `before` is the client's last one."""
    (session,) = read("keys", message)
    opened_round, opened = (-1, NONE) if before is None else (before.opened_round, before.opened)
    if t < opened_round:
        raise ProtocolError(
            f"round {t} is over: this client has taken part in round {opened_round}, and sums of one round over "
            "different clients tell of single ones; begin another run, with another run-name"
        )
    private = to_tensor(b"".join(new_key() for _ in range(3))).reshape(3, KEY)
    begun = Session(1, session, member.client, t, private, opened_round=opened_round, opened=opened)
    announced = member.announced(begun)
    if member.privacy.secure_signed:
        announced += member.identity.sign(announced, to_bytes(session), member.client)
    return begun, {"keys": to_tensor(announced)}


def share(session: Session, message: Arrays, member: Member) -> tuple[Session, Arrays]:
    """The second question: who takes part, by which keys and weights."""
    privacy, name = member.privacy, to_bytes(session.id)
    _, clients, keys, numbers = read("shares", message, session, width(privacy))
    if len(numbers) != 1:
        raise ProtocolError(f"array {NAMED + 'threshold'!r} must hold one number")
    (threshold,), count = numbers, len(clients)
    if count < LEAST:
        raise ProtocolError(
            f"{count} clients take part, and a sum of fewer than {LEAST} hides nobody"
        )
    if len(np.unique(keys.numpy(), axis=0)) < count:
        raise ProtocolError("two clients have the same keys")
    if session.client not in clients:
        raise ProtocolError("this client is not among those of the session")
    own = to_bytes(keys[clients.index(session.client), :ANNOUNCED])
    if own != member.announced(session):
        raise ProtocolError("the keys of this client, or its number of examples, were changed")
    if not privacy.survivors(count) <= threshold <= count:
        raise ProtocolError(
            f"the threshold is {threshold} of {count} clients, outside what the settings allow"
        )
    FixedPoint.of(privacy).check(count)
    most = 1 if member.examples is None else MOST_EXAMPLES
    for client, row in zip(clients, keys, strict=True):
        if not 1 <= (examples := count_in(row)) <= most:
            why = "all clients count alike" if most == 1 else "that is no number of examples"
            raise ProtocolError(f"client {client} would count by {examples} examples, but {why}")
        if privacy.secure_signed:
            announced, signature = to_bytes(row[:ANNOUNCED]), to_bytes(row[ANNOUNCED:])
            member.identity.check(announced, signature, name, client)
    session = replace(
        session,
        answered=2,
        threshold=threshold,
        clients=torch.tensor(clients),
        keys=keys,
    )
    session = replace(session, roster=told(session, member))
    points = [client + 1 for client in clients]
    seeds, privates = (split(to_bytes(session.private[i]), threshold, points) for i in (2, 1))
    sealed = [
        seal(session.key("shares", session.client, to), seed + private)
        for to, seed, private in zip(clients, seeds, privates, strict=True)
    ]
    return session, {"shares": to_tensor(b"".join(sealed)).reshape(-1, SEALED)}


def mask(session: Session, message: Arrays, numbers: Numbers) -> tuple[Session, Arrays]:
    """The third question: the reply in whole numbers, which this changes to the masked ones.

    Signed keys of an earlier session could be sent again by the server. But only who holds the private key can seal a
    share for this client's new key, so with signed keys every share must open.
    """
    _, sharers, shares = read("train", message, session)
    session.check_those(sharers, session.clients)
    session = replace(session, answered=3, sharers=torch.tensor(sharers), shares=shares)
    if session.keys.shape[1] > ANNOUNCED and UNREADABLE * 2 in session.opened_shares():
        raise ProtocolError("a client did not seal its shares with the keys that it signed")
    for other in sharers:
        if other != session.client:
            pair = sorted((session.client, other))
            add_mask(numbers, session.key("mask", *pair), 1 if session.client < other else -1)
    add_mask(numbers, to_bytes(session.private[2]))
    return session, {"masked": torch.from_numpy(numbers.view(f"i{numbers.itemsize}"))}


def unmask(session: Session, message: Arrays) -> tuple[Session, Arrays]:
    """The fourth question: whose replies arrived. Ends the session; all its secrets are dropped.

    A round that is done again has the same replies. The difference of its two sums must not be one reply, or two.
    """
    _, survivors = read("unmask", message, session)
    session.check_those(survivors, session.sharers)
    others, t = set(survivors) ^ set(session.opened.tolist()), session.round
    if t == session.opened_round and 0 < len(others) < LEAST:
        raise ProtocolError(
            f"round {t} was summed before, without or with {len(others)} other clients, of which the difference of the "
            "two sums would tell"
        )
    pairs = zip(session.opened_shares(), session.sharers.tolist(), strict=True)
    answers = [opened[:SHARE] if other in survivors else opened[SHARE:] for opened, other in pairs]
    ended = Session(
        4, session.id, session.client, t, opened_round=t, opened=torch.tensor(survivors)
    )
    return ended, {"shares": to_tensor(b"".join(answers)).reshape(-1, SHARE)}


def to_bytes(array: torch.Tensor) -> bytes:
    """An array of bytes as bytes."""
    return array.numpy().tobytes()


def to_tensor(text: bytes) -> torch.Tensor:
    """Bytes as an array."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
