"""A client on its own machine in a secure sum: its session is on disk, and no reply leaves it unmasked.

A client app may be a new process for every question. What a session has answered is therefore written before the answer
leaves, under a lock, so that no server is answered twice, whatever it sends at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from fedspan.core import checkpoint, wire
from fedspan.core.errors import CheckpointError, ProtocolError
from fedspan.core.privacy import Privacy
from fedspan.engine.lock import lock_dir
from fedspan.engine.worker import BUFFERS
from fedspan.privacy import secure_client
from fedspan.privacy.secure_client import NAMED, Session
from fedspan.privacy.secure_identity import Identity
from fedspan.privacy.secure_numbers import FixedPoint, Payload
from fedspan.remote.client import RemoteClient
from fedspan.remote.messages import RoundMessage, mark_of

WEIGHT = f"{NAMED}weight"  # w_i N, where clients do not all count alike


@dataclass(frozen=True)
class SessionFile:
    """The session of one client, in a directory of its own."""

    folder: Path

    def load(self) -> Session:
        """The session as its last answer left it."""
        try:
            arrays, _ = checkpoint.load(self.folder / "session")
        except CheckpointError:
            raise ProtocolError("this client has no session; a new one begins with keys") from None
        return wire.unpack(Session, arrays)

    def save(self, session: Session) -> None:
        """Writes a session; its secrets of the question before are gone from the file."""
        checkpoint.save(self.folder / "session", wire.pack(session), {})

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes of this client from answering at the same time."""
        with lock_dir(self.folder):
            yield


@dataclass(frozen=True, eq=False)
class SecureClient(RemoteClient):
    """A client whose replies leave its machine masked only."""

    secure: Privacy = field(default_factory=lambda: Privacy(secure=True))
    identity: Identity | None = None  # where keys are signed

    @property
    def session_file(self) -> SessionFile:
        """Next to the client's state."""
        return SessionFile(self.state_file.path.with_suffix(".session"))

    def answer(self, message: RoundMessage) -> wire.Arrays:
        """The answer to one of the four questions."""
        if message.status == "train":
            return self._masked(message)
        with self.session_file.locked():
            if message.status == "keys":
                session, answer = secure_client.advertise(message.arrays, self.client, self.secure, self.identity)
            elif message.status == "shares":
                kept = self.session_file.load()
                session, answer = secure_client.share(kept, message.arrays, self.secure, self.identity)
            else:
                session, answer = secure_client.unmask(self.session_file.load(), message.arrays)
            self.session_file.save(session)
        return answer

    def _masked(self, message: RoundMessage) -> wire.Arrays:
        """The third question: the reply of a round, rounded and masked. The state follows from the rounded numbers."""
        self.session_file.load().expects("train", message.arrays)  # before hours of training
        done = self._train(message)
        reply = dict(done.up)
        if BUFFERS in reply:
            reply[BUFFERS] = reply[BUFFERS] - done.down[BUFFERS]
        numbers, counted = Payload.of(FixedPoint.of(self.secure), reply).encode(reply, _weight(message.arrays))
        after = done.after  # with noise of the clients it follows from the reply without it, see `privacy.mechanism`
        if self.privacy is None or not self.privacy.noise:
            after = replace(after, state=self._settle(done, counted))
        with self.session_file.locked():
            session, answer = secure_client.mask(self.session_file.load(), message.arrays, numbers)
            self.session_file.save(session)
        self.state_file.save(message, mark_of(answer), done.before, after)
        return answer


def _weight(arrays: wire.Arrays) -> float:
    given = arrays.get(WEIGHT, torch.ones(1, dtype=torch.float64))
    if given.numel() != 1 or not 0 < float(given) < float("inf"):
        raise ProtocolError("the weight of this client must be one positive number")
    return float(given)
