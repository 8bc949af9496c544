"""The server's end of a run across machines with secure sums: it never holds a reply that it could read.

A round has four exchanges of messages: keys, shares, the masked replies, and the shares that remove the masks. A client
may be gone at any of them. A round with fewer clients than the threshold changes nothing: no update is accepted, and
the clients' states roll back by themselves at their next message, as after any reply that was lost.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from fedspan.core import wire
from fedspan.core.errors import SpecError
from fedspan.core.layout import Vector
from fedspan.core.privacy import Privacy
from fedspan.core.reply import weighted
from fedspan.core.round import Round, Terms
from fedspan.engine.transport import Replies
from fedspan.engine.worker import BUFFERS
from fedspan.privacy.secure_numbers import FixedPoint, Payload, clipped_values
from fedspan.privacy.secure_sum import SecureSum, TooFewError
from fedspan.remote.channel import Event, in_words
from fedspan.remote.messages import RoundMessage, Status
from fedspan.remote.server import Collected, RemoteTransport


@dataclass(eq=False)
class SecureTransport(RemoteTransport):
    """A Transport to clients on other machines whose replies are added up by secure aggregation."""

    secure: Privacy = field(default_factory=lambda: Privacy(secure=True))

    def __post_init__(
        self, x0: Vector, clients: int, backup: bool, copies_dir: Path | None, resume: bool
    ) -> None:
        if backup:
            raise SpecError(
                "`privacy.secure` hides replies, from which a server would make its copies of the clients' states; set "
                "backup = false"
            )
        super().__post_init__(x0, clients, backup, copies_dir, resume)
        self._used: set[bytes] = set()

    def _exchange(self, rnd: Round, down: Any, extra: wire.Arrays) -> Replies:
        self.over, ids = False, rnd.ids[0].tolist()
        payload = Payload.of(
            FixedPoint.of(self.secure), self._expect(rnd, down, extra), self.method.statistics
        )
        session = _Session(self, rnd, down, extra, Collected({}, np.zeros(len(ids), np.int64)))
        shares = (
            None
            if rnd.weights is None
            else dict(zip(ids, rnd.weights[0, :, 0].tolist(), strict=True))
        )
        about = f"{rnd.t} {self.agreement.fingerprint}"
        one = SecureSum(
            ids, payload.length, self.secure, session.ask, self._used, weights=shares, about=about
        )
        one.threshold = max(one.threshold, self.min_replies)
        found = session.found
        try:
            survivors, total = one.run()
        except TooFewError as error:
            found.events += [Event(*event) for event in one.events]
            self.over = one.asked == "unmask"  # clients help to open a round once
            events = [*in_words(rnd.t, found.events), f"round {rnd.t}: {error}; nothing counted"]
            return Replies(
                np.array([], np.int64),
                None,
                extra.get(BUFFERS),
                found.sent[None],
                events=tuple(events),
            )
        found.events += [Event(*event) for event in one.events]
        places = np.array([ids.index(client) for client in survivors])
        places.sort()
        mean, clipped = payload.decode(
            total, sum(one.factors[client] for client in survivors), len(places)
        )
        events = in_words(rnd.t, found.events) + (
            [clipped_values(rnd.t, clipped, self.secure)] if clipped else []
        )
        buffers = extra[BUFFERS] + mean.pop(BUFFERS) if BUFFERS in mean else None
        self.accepted[rnd.ids[0, places]] += 1
        self.marks[rnd.ids[0, places]] = [found.marks[place] for place in places.tolist()]
        received = np.array([[session.received[place] for place in places.tolist()]])
        up: Any = weighted(wire.unpack(mean), rnd.subset(places))
        return Replies(places, up, buffers, found.sent[None], received, tuple(events))

    def _clipped(self, arrays: wire.Arrays, message: RoundMessage, terms: Terms) -> wire.Arrays:
        """A masked reply has no norm; clients clip before they mask."""
        return arrays

    def _try(self, arrays: wire.Arrays, rnd: Round) -> None:
        """A masked reply cannot be tried."""


@dataclass
class _Session:
    """Asks the clients of a round the questions of a secure sum."""

    end: SecureTransport
    rnd: Round
    down: Any
    extra: wire.Arrays
    found: Collected
    received: Counter[int] = field(default_factory=Counter)  # bytes from each place

    def ask(
        self, phase: str, messages: dict[int, wire.Arrays], expected: wire.Arrays
    ) -> dict[int, wire.Arrays]:
        """The answers to one question, by client; whoever is silent or wrong is an event."""
        places = {client: place for place, client in enumerate(self.rnd.ids[0].tolist())}
        part = replace(self.found, expected=expected, replies={}, received={}, marks={}, lost=[])
        own = {places[client]: message for client, message in messages.items()}
        self.end._collect(
            {p: self._message(phase, p, one, expected) for p, one in own.items()}, part, self.rnd
        )
        lost = part.lost if phase == "train" else ()
        again = {
            p: self.end._restore(self.rnd, p, self.down, self.extra | own[p], part) for p in lost
        }
        self.end._collect({p: one for p, one in again.items() if one is not None}, part, self.rnd)
        named = {event.client for event in part.events}
        for client, place in places.items():
            if place in own and place not in part.replies and client not in named:
                part.events.append(Event(client, f"no answer to {phase!r} in time"))
        self.received.update(part.received)
        if phase == "train":
            self.found.marks = part.marks
        clients = self.rnd.ids[0].tolist()
        return {clients[place]: arrays for place, arrays in part.replies.items()}

    def _message(
        self, phase: str, place: int, arrays: wire.Arrays, expected: wire.Arrays
    ) -> RoundMessage:
        if phase == "train":
            arrays = wire.pack(wire.pick(self.down, place)) | self.extra | arrays
        return self.end._message(self.rnd, place, arrays, expected, cast(Status, phase))
