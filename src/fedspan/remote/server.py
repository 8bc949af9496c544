"""The server's end of a run across machines: a Transport over any channel that carries messages.

A round continues with the clients that replied well. A reply is accepted if it is the first one, belongs to this round,
comes from a client that computes the same thing, and has finite numbers of the right shape. Anything else becomes an
event. A client that lost its state is sent it again: from the server's copy, or else as the initial state.

With secure sums a round has four exchanges of messages: keys, shares, the masked replies, and the shares that remove
the masks (`replies.secure`). The server never holds a reply that it could read. A client may be gone at any of them. A
round with fewer clients than the threshold changes nothing: no update is accepted, and the clients' states roll back by
themselves at their next message, as after any reply that was lost.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from dataclasses import InitVar, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from fedspan.core import wire
from fedspan.core.bundle import STATISTIC, Bundle, outside, weighted
from fedspan.core.errors import DiskError, ProtocolError, SpecError, at_least, one_line
from fedspan.core.layout import Layout, Vector
from fedspan.core.method import Method
from fedspan.core.objective import Flat
from fedspan.core.round import Round, Terms
from fedspan.core.sync import dated as redated
from fedspan.engine.simulator import BUFFERS, without_zeros
from fedspan.engine.states import ClientStates
from fedspan.remote.channel import Channel, Failure, StalledError
from fedspan.remote.client import LAST_ROUND, RESTORE
from fedspan.remote.messages import (
    QUESTIONS,
    Agreement,
    RoundMessage,
    Status,
    check_arrays,
    mark_of,
)
from fedspan.replies.chain import Chain, Event, Replies
from fedspan.replies.clip import leaked, scaled
from fedspan.replies.clip import norms as norms_of_replies
from fedspan.replies.fixed_point import FixedPoint, Payload, clipped_values
from fedspan.replies.screen import OUTSIDE, norms

ROOM = 1024  # bytes per array of a reply for its name and header
FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0  # seconds between two attempts at a round


class DroppedError(ProtocolError):
    """A reply that does not count, and the kind of its event."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass
class Collected:
    """What a round's messages have brought so far, by place in the cohort."""

    expected: wire.Arrays  # a reply as it must look
    sent: npt.NDArray[np.int64]  # payload bytes
    replies: dict[int, wire.Arrays] = field(default_factory=dict)
    received: Counter[int] = field(default_factory=Counter)  # payload bytes
    marks: dict[int, int] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def silent(self, rnd: Round, places: list[int], text: str) -> None:
        """Notes those of some places that neither replied nor failed."""
        named = {event.client for event in self.events}
        for place in places:
            client = int(rnd.ids[0, place])
            if place not in self.replies and client not in named:
                self.events.append(Event("no reply", client, text))


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

    def __post_init__(
        self, x0: Vector, clients: int, backup: bool, copies_dir: Path | None, resume: bool
    ) -> None:
        at_least("min_replies", self.min_replies, 1)
        self.accepted = np.zeros(clients, np.int64)  # updates per client
        self.marks = np.zeros(clients, np.int64)  # of the last of them
        self._x0 = x0.new_zeros(()).expand(1, *x0.shape[1:])
        self.first = without_zeros(self.method.init_client(self._x0, self.layout))
        self.over = False  # whether the last round cannot be tried again
        self._expected: dict[tuple[int, ...], wire.Arrays] = {}  # by the sizes of the download
        self._used: set[bytes] = set()  # public keys of secure sums
        # Copies follow from the accepted replies. Private fields of a state cannot be copied: they start again.
        self.private = self.method.private
        if type(self.method).update_client_state is Method.update_client_state:
            self._copy_nothing()
        without = self.private if backup else tuple(vars(self.first))
        self.kept = backup
        self.copies = ClientStates(
            self.first, clients, copies_dir, resume=resume, own=True, without=without
        )

    def exchange(self, rnd: Round, down: Any, buffers: Vector | None, chain: Chain) -> Replies:
        """Send a round's messages and wait for the replies; clients that lost their state get a second message."""
        extra: wire.Arrays = {} if buffers is None else {BUFFERS: buffers}
        once = self._exchange if chain.secure is None else self._secure_exchange
        replies = once(rnd, down, extra, chain)
        began, delay = time.monotonic(), FIRST_DELAY
        while self.pause and not len(replies.places) and not self.over:
            if time.monotonic() - began > self.pause:
                last = "; ".join(event.text for event in replies.events[-2:])
                raise StalledError(
                    f"round {rnd.t} had fewer than {self.min_replies} accepted replies for {self.pause:g} s "
                    f"({last}); resume the run when the clients are back"
                )
            time.sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY)
            before, replies = replies, once(rnd, down, extra, chain)
            assert before.sent is not None
            assert replies.sent is not None
            replies = replace(
                replies, sent=before.sent + replies.sent, events=before.events + replies.events
            )
        return replies

    def _exchange(self, rnd: Round, down: Any, extra: wire.Arrays, chain: Chain) -> Replies:
        cohort = rnd.ids.shape[1]
        found = Collected(self._expect(rnd, down, extra), np.zeros(cohort, np.int64))
        messages = {
            place: self._message(rnd, place, self._download(down, place) | extra, found.expected)
            for place in range(cohort)
        }
        self._collect(messages, found, rnd)
        self._collect(self._restored(rnd, found.lost, down, extra, found), found, rnd)
        self._screen(rnd, found, chain)
        found.silent(rnd, list(range(cohort)), "no reply in time")
        if (count := len(found.replies)) < self.min_replies:
            few = f"{count} of {cohort} replies, fewer than {self.min_replies}; nothing counted"
            return self._nothing(found, extra, few)
        places = np.array(sorted(found.replies))
        accepted = rnd.subset(places)
        replies, beside = chain.gathering(accepted), []
        for number, place in enumerate(places.tolist()):
            # one at a time: a large reply is not kept beside the mean
            arrays = found.replies.pop(place)
            beside += [arrays.pop(BUFFERS)] if BUFFERS in arrays else []
            up: Any = wire.unpack(arrays)
            self._copy(rnd.subset(np.array([place])), down, up)
            replies.add(number, up)
            del arrays, up
        buffers = torch.cat(beside, 1) if beside else None
        return self._accept(accepted, places, replies.reply(), buffers, found)

    def _secure_exchange(self, rnd: Round, down: Any, extra: wire.Arrays, chain: Chain) -> Replies:
        from fedspan.replies.secure.server import SecureSum, TooFewError

        assert chain.secure is not None
        self.over, ids = False, rnd.ids[0].tolist()
        places = {client: place for place, client in enumerate(ids)}
        fixed = FixedPoint.of(chain.secure)
        payload = Payload.of(fixed, self._expect(rnd, down, extra), self.method.statistics)
        found = Collected({}, np.zeros(len(ids), np.int64))

        def ask(
            phase: str, messages: dict[int, wire.Arrays], expected: wire.Arrays
        ) -> dict[int, wire.Arrays]:
            """The answers to one question, by client; whoever is silent or wrong is an event."""
            part = replace(found, expected=expected, replies={}, marks={}, lost=[])
            own = {places[client]: message for client, message in messages.items()}
            whole = own
            if phase == "train":
                whole = {p: self._download(down, p) | extra | one for p, one in own.items()}
            status = cast(Status, phase)
            asked = {p: self._message(rnd, p, one, expected, status) for p, one in whole.items()}
            self._collect(asked, part, rnd, masked=True)
            again = dict[int, RoundMessage]()
            for place in part.lost if phase == "train" else ():
                again |= self._restored(rnd, [place], down, extra | own[place], part)
            self._collect(again, part, rnd, masked=True)
            part.silent(rnd, list(own), f"no answer to {phase!r} in time")
            found.marks = part.marks if phase == "train" else found.marks
            return {ids[place]: arrays for place, arrays in part.replies.items()}

        weights = None if rnd.weights is None else rnd.weights[0, :, 0].tolist()
        one = SecureSum(
            ids, payload.length, chain.secure, ask, self._used,
            weights=None if weights is None else dict(zip(ids, weights, strict=True)),
            about=f"{rnd.t} {self.agreement.fingerprint}",
        )  # fmt: skip
        one.threshold = max(one.threshold, self.min_replies)
        few = ""
        try:
            survivors, total = one.run()
        except TooFewError as error:
            few = f"{error}; nothing counted"
        found.events += [Event("refused", client, text) for client, text in one.events]
        if few:
            self.over = one.asked == "unmask"  # clients help to open a round once
            return self._nothing(found, extra, few)
        counted = np.array(sorted(places[client] for client in survivors))
        factors = sum(one.factors[client] for client in survivors)
        mean, clipped = payload.decode(total, factors, len(counted))
        if clipped:
            found.events.append(Event("other", None, clipped_values(clipped, chain.secure)))
        buffers = extra[BUFFERS] + mean.pop(BUFFERS) if BUFFERS in mean else None
        accepted = rnd.subset(counted)
        up: Any = weighted(wire.unpack(mean), accepted)
        return self._accept(accepted, counted, up, buffers, found)

    def _nothing(self, found: Collected, extra: wire.Arrays, few: str) -> Replies:
        """A round that changes nothing."""
        events = (*found.events, Event("other", None, few))
        none = np.array([], np.int64)
        return Replies(none, None, extra.get(BUFFERS), found.sent[None], events=events)

    def _accept(
        self,
        accepted: Round,
        places: npt.NDArray[np.int64],
        up: Any,
        buffers: Vector | None,
        found: Collected,
    ) -> Replies:
        """Counts the updates of a round's clients."""
        self.accepted[accepted.ids[0]] += 1
        self.marks[accepted.ids[0]] = [found.marks[place] for place in places.tolist()]
        received = np.array([[found.received[place] for place in places.tolist()]])
        return Replies(places, up, buffers, found.sent[None], received, tuple(found.events))

    def _download(self, down: Any, place: int) -> wire.Arrays:
        return wire.pack(wire.pick(down, place))

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

    def _collect(
        self, messages: dict[int, RoundMessage], found: Collected, rnd: Round, masked: bool = False
    ) -> None:
        """Send messages, by place in the cohort, and take in the replies as they arrive.

        Whatever goes wrong with one reply is that client's failure, never the run's. A masked reply cannot be tried,
        and has no norm: clients clip before they mask.
        """
        places = list(messages)
        for place, message in messages.items():
            found.sent[place] += message.bytes
        for index, reply in self.channel.deliver(list(messages.values())) if messages else ():
            place, message = places[index], messages[places[index]]
            try:
                if isinstance(reply, Failure):
                    found.sent[place] -= 0 if reply.sent else message.bytes
                    raise DroppedError(reply.kind, reply.reason)
                self._check(reply, message, place in found.replies)
                if reply.status == "lost":
                    found.lost.append(place)
                    raise DroppedError("state lost", f"state lost: {reply.reason}")
                arrays = self._read(reply, found.expected)
                if not masked and rnd.privacy is not None:  # clients may not keep to it
                    arrays = self._clipped(arrays, message, rnd.privacy)
                if not masked:
                    self._try(arrays, rnd.subset(np.array([place])))
                found.replies[place] = arrays
                found.received[place] += reply.bytes
                found.marks[place] = mark_of(reply.arrays)
            except DiskError:
                raise
            except Exception as error:
                kind = error.kind if isinstance(error, DroppedError) else "other"
                found.events.append(Event(kind, message.client, one_line(error)))

    def _screen(self, rnd: Round, found: Collected, chain: Chain) -> None:
        """Drops replies that are far larger than usual; the states of their clients do not advance."""
        for kind in range(2) if chain.screen.factor is not None else ():
            places = sorted(found.replies)
            own = [
                [
                    array
                    for name, array in found.replies[place].items()
                    if (name == BUFFERS) == bool(kind) and not name.startswith(STATISTIC)
                ]
                for place in places
            ]
            if any(own):
                sizes = [[norms(arrays)[0][0] for arrays in own]]
                for outlier in chain.screen.judge(sizes, kind):
                    place = places[outlier.place]
                    del found.replies[place]
                    found.events.append(Event("left out", int(rnd.ids[0, place]), outlier.why))

    def _check(self, reply: RoundMessage, message: RoundMessage, again: bool) -> None:
        """Raise unless this is the first reply to a message, and one that says how the client's work went."""
        if reply.status == "refused":
            raise DroppedError("refused", f"refused: {self.agreement.explain(reply)}")
        if reply.status == "failed":
            raise DroppedError("failed", f"failed: {reply.reason}")
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
            raise DroppedError("refused", f"reply refused: {error}") from None
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
        own = {name: array for name, array in arrays.items() if name != BUFFERS}
        up: Any = wire.unpack(own)
        try:
            self.method.server_step(self._first_server, up, rnd)
        except Exception as error:
            told = f"reply refused: it cannot be decoded ({one_line(error, 80)})"
            raise DroppedError("refused", told) from None

    def _restored(
        self, rnd: Round, lost: list[int], down: Any, extra: wire.Arrays, found: Collected
    ) -> dict[int, RoundMessage]:
        """Messages that bring the states of clients back, and x in full."""
        messages = {}
        for place in lost:
            client = int(rnd.ids[0, place])
            own = self.copies.take(np.array([client]), (1, 1))
            state = {f"{RESTORE}{name}": getattr(own, name) for name in self.copies.tables}
            private = f"; {', '.join(self.private)} starts again" if self.private else ""
            words = f"state restored from the server's copy{private}"
            last_round = int(rnd.last_round[0, place])
            if not self.kept:
                last_round, words = -1, "re-enters with an empty state: there is no copy of it"
            state[f"{RESTORE}{LAST_ROUND}"] = torch.tensor([last_round])
            found.events.append(Event("restored", client, words))
            dated = redated(down, place, last_round)
            try:
                arrays = wire.pack(wire.pick(dated, place, full=True))
            except ProtocolError as error:
                found.events.append(Event("other", client, f"cannot be brought back: {error}"))
                continue
            messages[place] = self._message(rnd, place, arrays | state | extra, found.expected)
        return messages

    def _copy_nothing(self) -> None:
        """Refuse a state of which nothing says what a reply does to it, before round 0."""
        nothing, rnd = Bundle(), cast(Any, None)
        self.method.update_client_state(self.first, nothing, nothing, rnd)

    def _copy(self, rnd: Round, down: Any, up: Any) -> None:
        """Renews the copy of the one client of `rnd` by its reply."""
        if not self.copies.tables:
            return
        old = leaked(self.method, self.copies.take(rnd.ids[0], (1, 1)), rnd)
        if (sync := down.get("sync")) is not None:
            down = down.replace(sync=replace(sync, last_round=rnd.last_round))
        self.copies.put(rnd.ids[0], self.method.update_client_state(old, down, up, rnd))

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
        copies = self.copies.save().items()
        return counts | {f"copy.{name}": array for name, array in copies}

    def saved(self) -> None:
        """The checkpoint with what `save` gave is on disk."""
        self.copies.saved()

    def load(self, arrays: wire.Arrays) -> None:
        """Return to what `save` gave."""
        mine = {"accepted": torch.from_numpy(self.accepted), "marks": torch.from_numpy(self.marks)}
        wire.check_forms({name: arrays[name] for name in mine}, mine)
        self.accepted, self.marks = (arrays[name].numpy().copy() for name in mine)
        copies = {k.removeprefix("copy."): v for k, v in arrays.items() if k.startswith("copy.")}
        if self.copies.tables and not copies:
            raise SpecError(
                "the checkpoint has no copies of the clients' states; resume with backup = false"
            )
        self.copies.load(copies)
