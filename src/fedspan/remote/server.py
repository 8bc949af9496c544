"""The server's end of a run across machines: a Transport over any channel that carries messages.

A round continues with the clients that replied well. A reply is accepted if it is the first one, belongs to this round,
comes from a client that computes the same thing, and has finite numbers of the right shape. Anything else becomes an
event. A client that lost its state is sent it again: from the server's copy (`remote.copies`), or else as the initial
state.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedspan.core import wire
from fedspan.core.config import Participation
from fedspan.core.errors import DiskError, ProtocolError, at_least, one_line
from fedspan.core.layout import Layout, Vector
from fedspan.core.method import Method
from fedspan.core.objective import Flat
from fedspan.core.reply import STATISTIC, outside
from fedspan.core.round import Round, Terms
from fedspan.core.sync import dated as redated
from fedspan.engine.running_mean import gathering
from fedspan.engine.screening import OUTSIDE, Screen, norms
from fedspan.engine.transport import Replies
from fedspan.engine.worker import BUFFERS, without_zeros
from fedspan.privacy.clipping import norms as norms_of_replies
from fedspan.privacy.clipping import scaled
from fedspan.remote.channel import Channel, Event, Failure, StalledError, in_words
from fedspan.remote.copies import Copies
from fedspan.remote.messages import (
    QUESTIONS,
    Agreement,
    RoundMessage,
    Status,
    check_arrays,
    mark_of,
)

ROOM = 1024  # bytes per array of a reply for its name and header
FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0  # seconds between two attempts at a round


@dataclass
class Collected:
    """What a round's messages have brought so far, by place in the cohort."""

    expected: wire.Arrays  # a reply as it must look
    sent: npt.NDArray[np.int64]  # payload bytes
    replies: dict[int, wire.Arrays] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)  # payload bytes
    marks: dict[int, int] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


@dataclass(eq=False)
class RemoteTransport:
    """A Transport to clients on other machines."""

    method: Method
    layout: Layout
    x0: InitVar[Vector]  # only its shape and type matter
    clients: InitVar[int]  # N
    channel: Channel
    agreement: Agreement
    min_replies: int = 1  # a round with fewer accepted replies changes nothing
    pause: float = 0.0  # seconds for which such a round is tried again; 0: it is counted
    backup: InitVar[bool] = True  # whether to keep a copy of every client's state
    copies_dir: InitVar[Path | None] = None  # directory for these copies; None: memory
    resume: InitVar[bool] = False  # whether an earlier process left its copies in `copies_dir`
    on_round: Callable[[Round, Replies], None] | None = None  # called after every round
    participation: Participation = field(default_factory=Participation)

    def __post_init__(
        self, x0: Vector, clients: int, backup: bool, copies_dir: Path | None, resume: bool
    ) -> None:
        at_least("min_replies", self.min_replies, 1)
        self.screen = Screen(self.participation.screen, 1, self.method.statistics)
        self.accepted = np.zeros(clients, np.int64)  # updates per client
        self.marks = np.zeros(clients, np.int64)  # of the last of them
        self._x0 = x0.new_zeros(()).expand(1, *x0.shape[1:])
        self.first = without_zeros(self.method.init_client(self._x0, self.layout))
        self.over = False  # whether the last round cannot be tried again
        self._expected: dict[
            tuple[int, ...], wire.Arrays
        ] = {}  # by the sizes of the server's message
        self.copies = Copies(
            self.method, self.first, clients, kept=backup, folder=copies_dir, resume=resume
        )

    def exchange(self, rnd: Round, down: Any, buffers: Vector | None) -> Replies:
        """Send a round's messages and wait for the replies; clients that lost their state get a second message."""
        extra: wire.Arrays = {} if buffers is None else {BUFFERS: buffers}
        replies = self._exchange(rnd, down, extra)
        began, delay = time.monotonic(), FIRST_DELAY
        while self.pause and not len(replies.places) and not self.over:
            if time.monotonic() - began > self.pause:
                raise StalledError(
                    f"round {rnd.t} had fewer than {self.min_replies} accepted replies for {self.pause:g} s "
                    f"({'; '.join(replies.events[-2:])}); resume the run when the clients are back"
                )
            time.sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY)
            before, replies = replies, self._exchange(rnd, down, extra)
            assert before.sent is not None
            assert replies.sent is not None
            replies = replace(
                replies, sent=before.sent + replies.sent, events=before.events + replies.events
            )
        if self.on_round is not None:
            self.on_round(rnd, replies)
        return replies

    def _exchange(self, rnd: Round, down: Any, extra: wire.Arrays) -> Replies:
        cohort = rnd.ids.shape[1]
        found = Collected(self._expect(rnd, down, extra), np.zeros(cohort, np.int64))
        downloads = [wire.pack(wire.pick(down, place)) for place in range(cohort)]
        messages = {
            p: self._message(rnd, p, own | extra, found.expected) for p, own in enumerate(downloads)
        }
        self._collect(messages, found, rnd)
        again = {place: self._restore(rnd, place, down, extra, found) for place in found.lost}
        self._collect(
            {place: message for place, message in again.items() if message is not None}, found, rnd
        )
        self._leave_out(rnd, found)
        named = {event.client for event in found.events}
        for place, client in enumerate(rnd.ids[0].tolist()):
            if place not in found.replies and client not in named:
                found.events.append(Event(client, "no reply in time"))
        events = in_words(rnd.t, found.events)
        if (count := len(found.replies)) < self.min_replies:
            events.append(
                f"round {rnd.t}: {count} of {cohort} replies, fewer than {self.min_replies}; nothing counted"
            )
            return Replies(
                np.array([], np.int64),
                None,
                extra.get(BUFFERS),
                found.sent[None],
                events=tuple(events),
            )
        return self._accept(rnd, down, found, tuple(events))

    def _message(
        self,
        rnd: Round,
        place: int,
        arrays: wire.Arrays,
        expected: wire.Arrays,
        question: Status = "train",
    ) -> RoundMessage:
        client = int(rnd.ids[0, place])
        most = sum(ROOM + array.numel() * array.element_size() for array in expected.values())
        return RoundMessage(
            question, rnd.t, client, int(self.accepted[client]), self.agreement.fingerprint, arrays,
            mark=int(self.marks[client]), max_reply=most,
        )  # fmt: skip

    def _collect(self, messages: dict[int, RoundMessage], found: Collected, rnd: Round) -> None:
        """Send messages, by place in the cohort, and take in the replies as they arrive.

        Whatever goes wrong with one reply is that client's failure, never the run's.
        """
        places = list(messages)
        for place, message in messages.items():
            found.sent[place] += message.bytes
        for index, reply in self.channel.deliver(list(messages.values())) if messages else ():
            place = places[index]
            try:
                if isinstance(reply, Failure):
                    found.sent[place] -= 0 if reply.sent else messages[place].bytes
                    raise ProtocolError(reply.reason)
                self._check(reply, messages[place], place in found.replies)
                if reply.status == "lost":
                    found.lost.append(place)
                    raise ProtocolError(f"state lost: {reply.reason}")
                arrays = self._read(reply, found.expected)
                if rnd.privacy is not None:  # clients may not keep to it
                    arrays = self._clipped(arrays, messages[place], rnd.privacy)
                self._try(arrays, rnd.subset(np.array([place])))
                found.replies[place], found.received[place] = arrays, reply.bytes
                found.marks[place] = mark_of(reply.arrays)
            except DiskError:
                raise
            except Exception as error:
                found.events.append(Event(messages[place].client, one_line(error)))

    def _leave_out(self, rnd: Round, found: Collected) -> None:
        """Drops replies that are far larger than usual; the states of their clients do not advance."""
        for kind in range(2) if self.screen.factor is not None and found.replies else ():
            places = sorted(found.replies)
            names = [
                n
                for n in found.replies[places[0]]
                if (n == BUFFERS) == bool(kind) and not n.startswith(STATISTIC)
            ]
            own = [[found.replies[place][name] for name in names] for place in places]
            if any(own):
                for outlier in self.screen.judge([[norms(arrays)[0][0] for arrays in own]], kind):
                    del found.replies[places[outlier.place]]
                    found.events.append(Event(int(rnd.ids[0, places[outlier.place]]), outlier.why))

    def _check(self, reply: RoundMessage, message: RoundMessage, again: bool) -> None:
        """Raise unless this is the first reply to a message, and one that says how the client's work went."""
        if reply.status == "refused":
            raise ProtocolError(f"refused: {self.agreement.explain(reply)}")
        if reply.status == "failed":
            raise ProtocolError(f"failed: {reply.reason}")
        if any(
            getattr(reply, one) != getattr(message, one)
            for one in ("t", "client", "accepted", "mark")
        ):
            raise ProtocolError(f"a reply to another message (round {reply.t}) was dropped")
        if again:
            raise ProtocolError("a second reply was dropped")
        if reply.status in QUESTIONS:
            raise ProtocolError(f"a reply of status {reply.status!r} was dropped")

    def _read(self, reply: RoundMessage, expected: wire.Arrays) -> wire.Arrays:
        try:
            self.agreement.check(reply)
            check_arrays(reply.arrays, expected)
            wrong = outside(self.method.statistics, reply.arrays)
            if wrong is not None and wrong.any():
                raise ProtocolError(OUTSIDE)
        except ProtocolError as error:
            raise ProtocolError(f"reply refused: {error}") from None
        return reply.arrays

    def _clipped(self, arrays: wire.Arrays, message: RoundMessage, terms: Terms) -> wire.Arrays:
        """A reply of the norm that every client has promised."""
        beside = {BUFFERS: arrays[BUFFERS]} if BUFFERS in arrays else {}
        clip = float(message.arrays[BUFFERS]) if beside else terms.clip
        own = {name: array for name, array in arrays.items() if name != BUFFERS}
        norm = norms_of_replies(list(own.values()))
        return {name: scaled(array, norm, clip) for name, array in own.items()} | beside

    @functools.cached_property
    def _first_server(self) -> Any:
        return self.method.init_server(self._x0, self.layout)

    def _try(self, arrays: wire.Arrays, rnd: Round) -> None:
        """Raise where the server's own step could not take a reply; whole numbers may point outside a vector."""
        if all(array.is_floating_point() for array in arrays.values()):
            return
        up: Any = wire.unpack({k: v for k, v in arrays.items() if k != BUFFERS})
        try:
            self.method.server_step(self._first_server, up, rnd)
        except Exception as error:
            raise ProtocolError(
                f"reply refused: it cannot be decoded ({one_line(error, 80)})"
            ) from None

    def _restore(
        self, rnd: Round, place: int, down: Any, extra: wire.Arrays, found: Collected
    ) -> RoundMessage | None:
        """A message that brings a client's state back, and x in full."""
        client = int(rnd.ids[0, place])
        state, last_round, words = self.copies.restored(client, int(rnd.last_round[0, place]))
        found.events.append(Event(client, words))
        dated = redated(down, place, last_round)
        try:
            arrays = wire.pack(wire.pick(dated, place, full=True))
        except ProtocolError as error:
            found.events.append(Event(client, f"cannot be brought back: {error}"))
            return None
        return self._message(rnd, place, arrays | state | extra, found.expected)

    def _accept(self, rnd: Round, down: Any, found: Collected, events: tuple[str, ...]) -> Replies:
        places = np.array(sorted(found.replies))
        accepted = rnd.subset(places)
        ids = accepted.ids[0]
        replies = gathering(self.method, accepted, self.participation.aggregator)
        beside = []
        for number, place in enumerate(
            places.tolist()
        ):  # one at a time: a large reply is not kept beside the mean
            arrays = found.replies.pop(place)
            beside += [arrays.pop(BUFFERS)] if BUFFERS in arrays else []
            up: Any = wire.unpack(arrays)
            self.copies.update(rnd.subset(np.array([place])), down, up)
            replies.add(number, up)
            del arrays, up
        buffers = torch.cat(beside, 1) if beside else None
        self.accepted[ids] += 1
        self.marks[ids] = [found.marks[place] for place in places.tolist()]
        received = np.array([[found.received[place] for place in places.tolist()]])
        return Replies(places, replies.reply(), buffers, found.sent[None], received, events)

    def _expect(self, rnd: Round, down: Any, extra: wire.Arrays) -> wire.Arrays:
        """A reply as it must look, from the method's own step on a flat objective.

        Messages of the same sizes have replies of the same shapes. A method whose rounds alternate has several.
        """
        sizes = tuple(
            value.numel() for value in vars(down).values() if isinstance(value, torch.Tensor)
        )
        if sizes not in self._expected:
            one = replace(rnd.subset(np.array([0])), overwrite=False)
            _, up = self.method.client_step(self.first, down, Flat(), one)
            self._expected[sizes] = {
                name: array.to("meta") for name, array in (wire.pack(up) | extra).items()
            }
        return self._expected[sizes]

    def save(self) -> wire.Arrays:
        """The number of accepted updates per client, the mark of the last one, and the copies of their states."""
        counts = {
            "accepted": torch.from_numpy(self.accepted),
            "marks": torch.from_numpy(self.marks),
        }
        return counts | {"usual": self.screen.save()} | self.copies.save()

    def saved(self) -> None:
        """The checkpoint with what `save` gave is on disk."""
        self.copies.saved()

    def load(self, arrays: wire.Arrays) -> None:
        """Return to what `save` gave."""
        mine = {"accepted": torch.from_numpy(self.accepted), "marks": torch.from_numpy(self.marks)}
        wire.check_forms({name: arrays[name] for name in mine}, mine)
        self.accepted, self.marks = (arrays[name].numpy().copy() for name in mine)
        self.screen.load(arrays["usual"])
        self.copies.load(arrays)
