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
import math
import time
from collections import Counter
from dataclasses import InitVar, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from fedspan.core import wire
from fedspan.core.bundle import Bundle, outside, weighted
from fedspan.core.errors import DiskError, ProtocolError, SpecError, at_least, one_line
from fedspan.core.layout import Layout, Vector
from fedspan.core.method import Method
from fedspan.core.objective import Flat
from fedspan.core.round import Round
from fedspan.core.sync import dated as redated
from fedspan.engine.simulator import BUFFERS, without_zeros
from fedspan.engine.states import ClientStates
from fedspan.nn.problem import Evaluation
from fedspan.remote.client import LAST_ROUND, RESTORE
from fedspan.remote.messages import (
    ANSWERS,
    Agreement,
    Channel,
    DroppedError,
    RoundMessage,
    StalledError,
    check_arrays,
    mark_of,
    under,
)
from fedspan.remote.sites import evaluate
from fedspan.replies.chain import OUTSIDE, Chain, Event, Replies
from fedspan.replies.clip import clipped, leaked
from fedspan.replies.fixed_point import FixedPoint, clipped_values

ROOM = 1024  # bytes per array of a reply for its name and header
FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0  # seconds between two attempts at a round


@dataclass
class Exchange:
    """What is sent in a round, and what it has brought so far, by place in the cohort."""

    rnd: Round
    down: Any
    extra: wire.Arrays  # buffers, if any
    sent: npt.NDArray[np.int64]  # payload bytes
    masked: bool  # by secure sums
    received: Counter[int] = field(default_factory=Counter)  # payload bytes
    marks: dict[int, int] = field(default_factory=dict)
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
    agreed: wire.Arrays = field(default_factory=dict)  # sent to clients that may not have it yet

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
            # refuses a state of which nothing says what a reply does to it, before round 0
            nothing, rnd = Bundle(), cast(Any, None)
            self.method.update_client_state(self.first, nothing, nothing, rnd)
        without = self.private if backup else tuple(vars(self.first))
        self.kept = backup
        self.copies = ClientStates(
            self.first, clients, copies_dir, resume=resume, own=True, without=without
        )

    def exchange(self, rnd: Round, down: Any, buffers: Vector | None, chain: Chain) -> Replies:
        """Do a round with the clients that reply well; with too few of them it is tried again for a while."""
        extra: wire.Arrays = {} if buffers is None else {BUFFERS: buffers}
        began, delay, none = time.monotonic(), FIRST_DELAY, np.zeros(rnd.ids.shape[1], np.int64)
        sent, events = none[None], tuple[Event, ...]()
        while True:
            found = Exchange(rnd, down, extra, none.copy(), chain.secure is not None)
            replies = (
                self._secure_round(found, chain) if found.masked else self._round(found, chain)
            )
            sent, events = sent + found.sent, (*events, *found.events)
            if len(replies.places) or not self.pause or self.over:
                return replace(replies, sent=sent, events=events)
            if time.monotonic() - began > self.pause:
                last = "; ".join(event.text for event in events[-2:])
                raise StalledError(
                    f"round {rnd.t} had fewer than {self.min_replies} accepted replies for {self.pause:g} s "
                    f"({last}); resume the run when the clients are back"
                )
            time.sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY)

    def _round(self, found: Exchange, chain: Chain) -> Replies:
        """A round whose replies the server can read."""
        rnd, cohort = found.rnd, found.rnd.ids.shape[1]
        came = self._ask(
            found,
            "train",
            {place: {} for place in range(cohort)},
            self._expect(rnd, found.down, found.extra),
        )
        if chain.factor is not None:
            order = sorted(came)
            for arrays in (came[place] for place in order):
                chain.came(_opened(arrays), arrays.get(BUFFERS))
            for row, event in chain.all_came(rnd.subset(np.array(order, np.int64))):
                came.pop(order[row], None)
                found.events.append(event)
        if len(came) < self.min_replies:
            few = f"{len(came)} of {cohort} replies, fewer than {self.min_replies}; nothing counted"
            return self._nothing(found, few)
        places = np.array(sorted(came))
        accepted = rnd.subset(places)
        replies, beside = chain.gathering(accepted), []
        for number, place in enumerate(places.tolist()):
            # one at a time: a large reply is not kept beside the mean
            arrays = came.pop(place)
            beside += [arrays[BUFFERS]] if BUFFERS in arrays else []
            up = _opened(arrays)
            self._copy(rnd.subset(np.array([place])), found.down, up)
            replies.add(number, up)
            del arrays, up
        buffers = torch.cat(beside, 1) if beside else None
        return self._accept(found, places, replies.reply(), buffers)

    def _secure_round(self, found: Exchange, chain: Chain) -> Replies:
        """A round of which the server learns the sum alone."""
        from fedspan.replies.secure.server import SecureSum, TooFewError

        assert chain.secure is not None
        rnd, ids = found.rnd, found.rnd.ids[0].tolist()
        like = self._expect(rnd, found.down, found.extra)
        places = {client: place for place, client in enumerate(ids)}
        fixed = FixedPoint.of(chain.secure, self.method.statistics)

        def ask(
            question: str, messages: dict[int, wire.Arrays], expected: wire.Arrays
        ) -> dict[int, wire.Arrays]:
            own = {places[client]: message for client, message in messages.items()}
            answers = self._ask(found, question, own, expected)
            return {ids[place]: arrays for place, arrays in answers.items()}

        weights = None if rnd.weights is None else rnd.weights[0, :, 0].tolist()
        length = 1 + sum(array.numel() for array in like.values())
        one = SecureSum(
            ids, length, chain.secure, ask, self._used,
            weights=None if weights is None else dict(zip(ids, weights, strict=True)),
            about=f"{rnd.t} {self.agreement.fingerprint}",
        )  # fmt: skip
        one.threshold = max(one.threshold, self.min_replies)
        try:
            survivors, total = one.run()
        except TooFewError as error:
            few = f"{error}; nothing counted"
        else:
            few = ""
        self.over = bool(few) and one.asked == "unmask"  # clients help to open a round once
        found.events += [Event("refused", client, text) for client, text in one.events]
        if few:
            return self._nothing(found, few)
        counted = np.array(sorted(places[client] for client in survivors))
        factors = sum(one.factors[client] for client in survivors)
        totals, clipped = fixed.split(total, like)
        mean = fixed.mean(totals, factors, len(counted), like)
        if clipped:
            found.events.append(Event("other", None, clipped_values(clipped, chain.secure)))
        buffers = found.extra[BUFFERS] + mean.pop(BUFFERS) if BUFFERS in mean else None
        up: Any = weighted(wire.unpack(mean), rnd.subset(counted))
        return self._accept(found, counted, up, buffers)

    def _nothing(self, found: Exchange, few: str) -> Replies:
        """A round that changes nothing."""
        found.events.append(Event("other", None, few))
        return Replies(np.array([], np.int64), None, found.extra.get(BUFFERS))

    def _accept(
        self, found: Exchange, places: npt.NDArray[np.int64], up: Any, buffers: Vector | None
    ) -> Replies:
        """Counts the updates of a round's clients."""
        clients = found.rnd.ids[0, places]
        self.accepted[clients] += 1
        self.marks[clients] = [found.marks[place] for place in places.tolist()]
        received = np.array([[found.received[place] for place in places.tolist()]])
        return Replies(places, up, buffers, received=received)

    # one question to some clients

    def _ask(
        self,
        found: Exchange,
        question: str,
        messages: dict[int, wire.Arrays],
        expected: wire.Arrays,
    ) -> dict[int, wire.Arrays]:
        """The replies to a question that are as they must be; a client that lost its state gets a second message.

        Whatever goes wrong with one reply is that client's failure, never the run's: it becomes an event.

        Args:
            found: The round; sent and received bytes, marks and events are added to it.
            question: Such as "train", with which the download is sent.
            messages: The arrays of the question, by place in the cohort.
            expected: A reply as it must look.
        """
        rnd, replies, lost, named = found.rnd, dict[int, wire.Arrays](), list[int](), set[int]()
        most = sum(ROOM + array.numel() * array.element_size() for array in expected.values())
        train = question == "train"
        for again in (False, True):
            asked: list[tuple[int, RoundMessage]] = []
            for place in lost if again else messages:
                client, arrays = int(rnd.ids[0, place]), messages[place]
                if train and not again:
                    first = {} if self.accepted[client] else self.agreed
                    arrays = wire.pack(wire.pick(found.down, place)) | found.extra | arrays | first
                elif again:
                    try:
                        arrays = self._restored(found, place) | found.extra | arrays | self.agreed
                    except ProtocolError as error:
                        text = f"cannot be brought back: {error}"
                        found.events.append(Event("other", client, text))
                        continue
                message = RoundMessage(
                    question, rnd.t, client, int(self.accepted[client]), self.agreement.fingerprint,
                    arrays, mark=int(self.marks[client]), max_reply=most,
                )  # fmt: skip
                found.sent[place] += message.bytes
                asked.append((place, message))
            lost = []
            for index, reply in self.channel.deliver([m for _, m in asked]) if asked else ():
                place, message = asked[index]
                try:
                    if isinstance(reply, DroppedError):
                        found.sent[place] -= 0 if reply.sent else message.bytes
                        raise reply
                    arrays = self._read(found, message, reply, expected)
                    if place in replies:
                        raise ProtocolError("a second reply was dropped")
                    replies[place] = arrays
                    found.received[place] += reply.bytes
                    if train:
                        found.marks[place] = mark_of(reply.arrays)
                except DiskError:
                    raise
                except Exception as error:
                    kind = error.kind if isinstance(error, DroppedError) else "other"
                    if train and kind == "state lost" and not again and place not in lost:
                        lost.append(place)
                    named.add(place)
                    found.events.append(Event(kind, message.client, one_line(error)))
        late = f"no answer to {question!r} in time" if found.masked else "no reply in time"
        for place in messages:
            if place not in replies and place not in named:
                found.events.append(Event("no reply", int(rnd.ids[0, place]), late))
        return replies

    def _read(
        self, found: Exchange, message: RoundMessage, reply: RoundMessage, expected: wire.Arrays
    ) -> wire.Arrays:
        """The arrays of a reply, clipped; the one place where a reply is refused.

        A masked reply cannot be tried, and has no norm: clients clip before they mask.
        """
        if reply.status == "refused":
            raise DroppedError(f"refused: {self.agreement.explain(reply)}", "refused")
        if reply.status == "failed":
            raise DroppedError(f"failed: {reply.reason}", "failed")
        if any(
            getattr(reply, one) != getattr(message, one)
            for one in ("t", "client", "accepted", "mark")
        ):
            raise ProtocolError(f"a reply to another message (round {reply.t}) was dropped")
        if reply.status == "lost":
            raise DroppedError(f"state lost: {reply.reason}", "state lost")
        if reply.status not in ANSWERS:
            raise ProtocolError(f"a reply of status {reply.status!r} was dropped")
        arrays = reply.arrays
        rnd = found.rnd.subset(np.flatnonzero(found.rnd.ids[0] == message.client))
        try:
            self.agreement.check(reply)
            check_arrays(arrays, expected)
            wrong = outside(self.method.statistics, arrays)
            if wrong is not None and wrong.any():
                raise ProtocolError(OUTSIDE)
            if found.masked:
                return arrays
            if rnd.privacy is not None:  # clients may not keep to it
                adapted = {BUFFERS: arrays[BUFFERS]} if BUFFERS in arrays else {}
                clip = float(message.arrays[BUFFERS]) if adapted else rnd.privacy.clip
                arrays = wire.pack(clipped(_opened(arrays), clip)[0]) | adapted
        except ProtocolError as error:
            raise DroppedError(f"reply refused: {error}", "refused") from None
        if not all(array.is_floating_point() for array in arrays.values()):
            try:  # whole numbers may point outside a vector
                self.method.server_step(self._first_server, _opened(arrays), rnd)
            except Exception as error:
                told = f"reply refused: it cannot be decoded ({one_line(error, 80)})"
                raise DroppedError(told, "refused") from None
        return arrays

    @functools.cached_property
    def _first_server(self) -> Any:
        return self.method.init_server(self._x0, self.layout)

    # the clients' states

    def _restored(self, found: Exchange, place: int) -> wire.Arrays:
        """What brings the state of a client back, and x in full."""
        rnd, client = found.rnd, int(found.rnd.ids[0, place])
        own = self.copies.take(np.array([client]), (1, 1))
        state = {f"{RESTORE}{name}": getattr(own, name) for name in self.copies.tables}
        last_round = int(rnd.last_round[0, place]) if self.kept else -1
        state[f"{RESTORE}{LAST_ROUND}"] = torch.tensor([last_round])
        private = f"; {', '.join(self.private)} starts again" if self.private else ""
        words = f"state restored from the server's copy{private}"
        if not self.kept:
            words = "re-enters with an empty state: there is no copy of it"
        found.events.append(Event("restored", client, words))
        dated = redated(found.down, place, last_round)
        return wire.pack(wire.pick(dated, place, full=True)) | state

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
        parts = vars(down).values()
        sizes = tuple(part.numel() for part in parts if isinstance(part, torch.Tensor))
        if sizes not in self._expected:
            place = np.array([0])
            one = replace(rnd.subset(place), overwrite=False)
            _, up = self.method.client_step(self.first, wire.of_clients(down, place), Flat(), one)
            arrays = wire.pack(up) | extra
            self._expected[sizes] = {name: array.to("meta") for name, array in arrays.items()}
        return self._expected[sizes]

    def evaluate(self, run: Any) -> list[Evaluation]:
        """Every client's own evaluation of the model; events say whose is missing."""
        events: list[Event] = []
        found = evaluate(
            self.channel,
            [{} if count else self.agreed for count in self.accepted],
            run.t,
            self.agreement.fingerprint,
            run.model(),
            run.buffers,
            events,
        )
        rows = []
        for client, one in sorted(found, key=lambda pair: pair[0]):
            metrics = {k: math.nan if v is None else v for k, v in one["metrics"].items()}
            about = {
                "client": run.problem.names[client],
                "data": one["data"],
                "examples": one["examples"],
            }
            rows.append((about | metrics, one["summaries"]))
        if events:
            run.note(events)
        return rows

    def save(self) -> wire.Arrays:
        """The number of accepted updates per client, the mark of the last one, and the copies of their states."""
        copies = self.copies.save().items()
        return self._counts() | {f"copy.{name}": array for name, array in copies}

    def _counts(self) -> wire.Arrays:
        counts = {"accepted": self.accepted, "marks": self.marks}
        return {name: torch.from_numpy(count) for name, count in counts.items()}

    def saved(self) -> None:
        """The checkpoint with what `save` gave is on disk."""
        self.copies.saved()

    def load(self, arrays: wire.Arrays) -> None:
        """Return to what `save` gave."""
        counts = self._counts()
        found = {name: arrays[name] for name in counts}
        wire.check_forms(found, counts)
        self.accepted, self.marks = (count.numpy().copy() for count in found.values())
        copies = under("copy.", arrays)
        if self.copies.tables and not copies:
            raise SpecError(
                "the checkpoint has no copies of the clients' states; resume with backup = false"
            )
        self.copies.load(copies)


def _opened(arrays: wire.Arrays) -> Any:
    """A reply from its arrays, without the buffers beside it."""
    return wire.unpack({name: array for name, array in arrays.items() if name != BUFFERS})
