"""A client on its own machine: its state on disk in two versions, and its reply to a message of the server.

The file of a client holds its state before and after its last round. The server decides which of the two is valid, by
its count of accepted updates and the mark of the last one: an update that never arrived is rolled back, and one that
was accepted is never lost. A count alone would not do: a process that the server no longer waits for may write its file
after a later one, and so may a process of another run.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedspan.core import checkpoint, wire
from fedspan.core.digest import digest, raw
from fedspan.core.errors import CheckpointError, DataError, ProtocolError, SpecError, one_line
from fedspan.core.files import lock_dir, make_dir
from fedspan.core.method import Method
from fedspan.core.objective import Problem
from fedspan.core.privacy import Privacy
from fedspan.core.round import Round, Terms
from fedspan.core.spec import Spec
from fedspan.core.terminal import log
from fedspan.engine.simulator import BUFFERS, Replica, answer, opened, without_zeros
from fedspan.remote.messages import (
    DESCRIBE,
    OPEN,
    SECURE,
    SUMS,
    Agreement,
    DroppedError,
    RoundMessage,
    mark_of,
    under,
)
from fedspan.remote.sites import (
    AGREED,
    TEXT,
    UNFIT,
    check_agreeing,
    from_text,
    own_evaluation,
    to_text,
)
from fedspan.replies.clip import after as after_reply
from fedspan.replies.clip import leaked
from fedspan.replies.fixed_point import FixedPoint, Numbers, in_limbs, to_limbs

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
RESTORE = "restore."  # prefix of arrays that bring back a lost state,
LAST_ROUND = "last_round"  # and of the round it is of
MAX_SETTINGS = 8000  # characters


@dataclass(frozen=True)
class StateFile:
    """Two versions of one client's state in one file."""

    path: Path

    @property
    def session_dir(self) -> Path:
        """Where the session of secure sums is kept."""
        return self.path.with_suffix(".session")

    @staticmethod
    def of(states_dir: Path, run: str, client: str) -> StateFile:
        """The file of a client in a run. Neither name can lead out of the directory."""
        for what, name in (("run name", run), ("client id", client)):
            if not NAME.fullmatch(name):
                raise SpecError(
                    f"{what} {name!r:.80} must be 1 to 64 of a-z, A-Z, 0-9, '.', '_' and '-', and not begin with '.'"
                )
        make_dir(states_dir / run)
        return StateFile(states_dir / run / f"{client}.safetensors")

    def load(self, accepted: int, mark: int, fingerprint: str) -> Replica:
        """The state after `accepted` updates, the last one with this mark; DroppedError where it is not there."""
        try:
            arrays, meta = checkpoint.load(self.path)
        except CheckpointError:
            what = "is damaged" if self.path.exists() else "is not there"
            raise DroppedError(f"the file {str(self.path)!r} {what}", "state lost") from None
        versions = [*zip(meta["accepted"], meta["marks"], strict=True)]
        if meta["fingerprint"] != fingerprint:
            why = "is of a run with another method, model, seed or other settings"
        elif accepted not in meta["accepted"]:
            why = f"is after {meta['accepted']} updates, the server counts {accepted}"
        elif (accepted, mark) not in versions:
            why = "follows from an update that the server has not accepted"
        else:
            version = versions.index((accepted, mark))
            own = under(f"{version}.", arrays)
            state = wire.unpack(under("state.", own))
            return Replica(state, own.get("x"), meta["last_round"][version])
        raise DroppedError(f"the state on disk {why}", "state lost")

    def save(
        self, message: RoundMessage, mark: int, before: Replica, after: Replica, fingerprint: str
    ) -> None:
        """Write both versions in one step that survives a crash; `mark` is that of the reply to the message."""
        arrays: wire.Arrays = {}
        for version, replica in enumerate((before, after)):
            if version or message.accepted:  # nobody asks for the initial state
                arrays |= {f"{version}.state.{k}": v for k, v in wire.pack(replica.state).items()}
                arrays |= {} if replica.x is None else {f"{version}.x": replica.x}
        meta = {
            "fingerprint": fingerprint,
            "accepted": [message.accepted, message.accepted + 1],
            "marks": [message.mark, mark],
            "last_round": [before.last_round, after.last_round],
        }
        checkpoint.save(self.path, arrays, meta)


@dataclass(frozen=True, eq=False)
class RemoteClient:
    """One client's end of a run: what it computes with, and where it keeps its state."""

    method: Method
    problem: Problem
    state_file: StateFile
    client: int  # 0 to N - 1
    seed: int
    agreement: Agreement
    rounds: int  # length of the run, which the agreement covers under a schedule
    privacy: Terms | None = None
    known_start: bool = False  # whether the client has the initial model by itself
    secure: Privacy | None = None  # settings of secure sums: replies leave the machine masked only
    identity: Any = None  # an `Identity`, where keys are signed
    weighted: bool = False  # whether clients count by their numbers of examples in secure sums
    allowed: str | None = None  # the metrics that this client may be evaluated by; None: all

    def reply(self, message: RoundMessage) -> RoundMessage:
        """Do the work of a round. Whatever goes wrong becomes a reply that says so."""
        reply = replace(message, fingerprint=self.agreement.fingerprint, arrays={})
        try:
            self.agreement.check(message)
            if message.client != self.client:
                raise ProtocolError(
                    f"the message is for client {message.client}, this is client {self.client}"
                )
            if message.status not in (OPEN if self.secure is None else SECURE):
                raise ProtocolError(
                    f"{message.status!r} is a question of secure sums, which this client's settings exclude"
                )
            return replace(reply, status="ok", arrays=self._answer(message))
        except Exception as error:
            status, settings = "failed", ""
            if isinstance(error, DroppedError):
                status = "lost"
            elif isinstance(error, ProtocolError):
                status, text = "refused", self.agreement.text
                if message.fingerprint != reply.fingerprint and len(text) <= MAX_SETTINGS:
                    settings = text
            reason = one_line(error)
            return replace(reply, status=status, reason=reason, settings=settings)

    def _answer(self, message: RoundMessage) -> wire.Arrays:
        """The arrays of the reply to a message; what it keeps is on disk before they leave."""
        if self.secure is not None:
            return self._secure_answer(message)
        if message.status != "train":
            return {TEXT: to_text(own_evaluation(self.problem, message.arrays, self.allowed))}
        before, after, up, _, _ = self._work(message)
        self.state_file.save(message, mark_of(up), before, after, self.agreement.of_states)
        return up

    def _work(
        self, message: RoundMessage
    ) -> tuple[Replica, Replica, wire.Arrays, wire.Arrays, Round]:
        """A round's local work: (the client before and after it, its reply, the download, the round)."""
        beside = (RESTORE, "secure.", AGREED)
        down = {k: v for k, v in message.arrays.items() if not k.startswith(beside)}
        before = self._replica(message)
        rnd = self._round(message.t, before.last_round)
        after, up = answer(self.method, self.problem, before, down, rnd)
        return before, after, up, down, rnd

    def _secure_answer(self, message: RoundMessage) -> wire.Arrays:
        """The answer to one of the four questions of a secure sum of replies."""
        from fedspan.replies.secure import client as protocol  # needs a library

        assert self.secure is not None
        examples = self.problem.examples(self.client) if self.weighted else None
        member = protocol.Member(
            self.client, self.secure, self.identity, examples, self.agreement.fingerprint
        )
        if message.status == "train":
            session = self.session(message.t)
            protocol.read("train", message.arrays, session)  # before hours of training
            before, after, up, down, rnd = self._work(message)
            if BUFFERS in up:
                up[BUFFERS] = up[BUFFERS] - down[BUFFERS]
            fixed = FixedPoint.of(self.secure, self.method.statistics)
            whole, counted, clipped = fixed.encode(up, session.factor())
            counted.pop(BUFFERS, None)
            # the state follows from the rounded numbers
            begun = leaked(self.method, before.state, rnd)
            opened_down = opened(self.method, before, down, rnd)
            state = after_reply(
                self.method, begun, after.state, opened_down, wire.unpack(counted), rnd
            )
            after = replace(after, state=state)
            reply = _in_session(self.state_file, message, member, fixed.join(whole, clipped))
            self.state_file.save(message, mark_of(reply), before, after, self.agreement.of_states)
            return reply
        return _in_session(self.state_file, message, member)

    def session(self, t: int | None = None) -> Any:
        """The session of secure sums as its last answer left it."""
        return _session(self.state_file, t)

    def _round(self, t: int, last_round: int = -1) -> Round:
        """A round of this client alone, which last took part in another one; -1: it never did."""
        layout, steps = self.problem.layout, None
        if self.problem.steps is not None:
            own = float(self.problem.steps[self.client])
            steps = torch.full((1, 1, 1), own, dtype=layout.dtype)
        return Round(
            t,
            (self.seed,),
            self.problem.clients,
            layout,
            np.array([[self.client]]),
            np.array([[last_round]]),
            local_steps=self.method.local_steps,
            steps=steps,
            known_start=self.known_start,
            rounds=self.rounds,
            privacy=self.privacy,
        )

    def _replica(self, message: RoundMessage) -> Replica:
        """The state before the round: from the message if it brings one, else the initial one or that on disk."""
        brought = under(RESTORE, message.arrays)
        if message.accepted and not brought:
            return self.state_file.load(message.accepted, message.mark, self.agreement.of_states)
        first = without_zeros(self.method.init_client(self.problem.x0, self.problem.layout))
        if brought:
            last_round = int(brought.pop(LAST_ROUND))
            return Replica(wire.unpack(wire.pack(first) | brought), None, last_round)
        if not self.known_start:
            return Replica(first)
        # what a new client has of the server's vectors before round 0, unless the method sends them in any case
        server = self.method.init_server(self.problem.x0, self.problem.layout)
        sync = self.method.broadcast(server, self._round(0)).get("sync")
        return Replica(first, None if sync is None else sync.model)


def answer_before(
    message: RoundMessage, spec: Spec, client: int, state_file: StateFile, identity: Any
) -> wire.Arrays:
    """Return a client's answer to a question before round 0; with secure sums its counts and sums are masked."""
    check_agreeing(spec)
    if message.status == DESCRIBE:
        return {TEXT: to_text(spec.task.describe(client, (spec.seed,), spec))}
    if message.status not in ((SUMS,) if spec.secure is None else SECURE):
        raise ProtocolError(
            f"{message.status!r} is not a question about tables with this client's settings of `privacy.secure`"
        )
    text = message.arrays.get(TEXT)
    asked = from_text(text)
    if message.status == SUMS:
        return {TEXT: to_text(spec.task.sums(client, spec.seed, asked))}
    from fedspan.replies.secure.client import Member  # needs a library

    assert spec.secure is not None
    assert text is not None
    # all clients must be asked for sums of the same columns and classes, or the server could make a sum of one client's
    member = Member(client, in_limbs(spec.secure), identity, settings=digest(raw(text), size=32))
    numbers = None
    if message.status == "train":
        try:
            numbers = to_limbs(spec.task.sums(client, spec.seed, asked))
        except DataError as error:
            log.error("fedspan refuses sums: %s", one_line(error))
            raise ProtocolError(UNFIT) from None
    return _in_session(state_file, message, member, numbers)


def _in_session(
    state_file: StateFile, message: RoundMessage, member: Any, numbers: Numbers | None = None
) -> wire.Arrays:
    """The answer to one of the four questions of a session; `numbers` are what the third one masks.

    A client app may be a new process for every question. What a session has answered is therefore written before the
    answer leaves, under a lock, so that no server is answered twice, whatever it sends at once.
    """
    from fedspan.replies.secure import client as protocol  # needs a library

    arrays, question, t = message.arrays, message.status, message.t
    with lock_dir(state_file.session_dir):
        if question == "keys":
            session, reply = protocol.advertise(arrays, member, t, _session(state_file))
        elif question == "shares":
            session, reply = protocol.share(_session(state_file, t), arrays, member)
        elif numbers is not None:
            session = _session(state_file, t)
            if not torch.equal(session.roster, protocol.told(session, member)):
                raise ProtocolError("the question is not the one that the session was begun for")
            session, reply = protocol.mask(session, arrays, numbers)
        else:
            session, reply = protocol.unmask(_session(state_file, t), arrays)
        checkpoint.save(state_file.session_dir / "session", session.arrays(), {})
    return reply


def _session(state_file: StateFile, t: int | None = None) -> Any:
    """The session of secure sums as its last answer left it, which must be of round t; None if it is damaged."""
    from fedspan.replies.secure.client import Session

    found = None
    with contextlib.suppress(CheckpointError, TypeError):
        found = Session.of(checkpoint.load(state_file.session_dir / "session")[0])
    if t is not None and (found is None or found.round != t):
        raise ProtocolError(f"this client has no session of round {t}; a new one begins with keys")
    return found
