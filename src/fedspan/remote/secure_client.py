"""A client on its own machine in a secure sum: its session is on disk, and no reply leaves it unmasked.

A client app may be a new process for every question. What a session has answered is therefore written before the answer
leaves, under a lock, so that no server is answered twice, whatever it sends at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedspan.core import checkpoint, wire
from fedspan.core.errors import CheckpointError, ProtocolError
from fedspan.core.files import lock_dir
from fedspan.core.privacy import Privacy
from fedspan.engine.simulator import BUFFERS
from fedspan.remote.client import RemoteClient
from fedspan.remote.messages import RoundMessage, mark_of
from fedspan.replies.fixed_point import FixedPoint, Payload
from fedspan.replies.secure import client as secure_client
from fedspan.replies.secure.client import Member, Session
from fedspan.replies.secure.identity import Identity


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

    def before(self) -> Session | None:
        """The session, if there is one; a damaged file is none."""
        try:
            return self.load()
        except ProtocolError:
            return None

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
    weighted: bool = False  # whether clients count by their numbers of examples

    @property
    def session_file(self) -> SessionFile:
        """Next to the client's state."""
        return SessionFile(self.state_file.path.with_suffix(".session"))

    @property
    def member(self) -> Member:
        """The client as it takes part in sums."""
        examples = self.problem.examples(self.client) if self.weighted else None
        return Member(self.client, self.secure, self.identity, examples, self.agreement.fingerprint)

    def answer(self, message: RoundMessage) -> wire.Arrays:
        """The answer to one of the four questions."""
        if message.status == "train":
            return self._masked(message)
        with self.session_file.locked():
            if message.status == "keys":
                before = self.session_file.before()
                session, answer = secure_client.advertise(
                    message.arrays, self.member, message.t, before
                )
            elif message.status == "shares":
                session, answer = secure_client.share(
                    self._session(message), message.arrays, self.member
                )
            else:
                session, answer = secure_client.unmask(self._session(message), message.arrays)
            self.session_file.save(session)
        return answer

    def _session(self, message: RoundMessage) -> Session:
        """The session on disk, if the message is of its round."""
        found = self.session_file.load()
        if found.round != message.t:
            raise ProtocolError(
                f"the session is of round {found.round}, the question of round {message.t}"
            )
        return found

    def _masked(self, message: RoundMessage) -> wire.Arrays:
        """The third question: the reply of a round, rounded and masked. The state follows from the rounded numbers."""
        session = self._session(message)
        session.expects("train", message.arrays)  # before hours of training
        done = self._train(message)
        reply = dict(done.up)
        if BUFFERS in reply:
            reply[BUFFERS] = reply[BUFFERS] - done.down[BUFFERS]
        payload = Payload.of(FixedPoint.of(self.secure), reply, self.method.types()[3])
        numbers, counted = payload.encode(reply, session.factor())
        after = replace(done.after, state=self._settle(done, counted))
        with self.session_file.locked():
            session, answer = secure_client.mask(self._session(message), message.arrays, numbers)
            self.session_file.save(session)
        self.state_file.save(message, mark_of(answer), done.before, after)
        return answer
