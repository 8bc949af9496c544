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
import operator
import time
from collections import Counter
from dataclasses import InitVar, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from fedspan.core import wire
from fedspan.core.bundle import Bundle, outside, weighted
from fedspan.core.errors import DiskError, ProtocolError, ResumableError, SpecError, one_line
from fedspan.core.layout import Layout, Vector
from fedspan.core.method import Method
from fedspan.core.objective import Flat
from fedspan.core.round import Round
from fedspan.core.sync import dated
from fedspan.engine.simulator import BUFFERS, without_zeros
from fedspan.engine.states import ClientStates
from fedspan.nn.problem import Evaluation
from fedspan.remote.client import LAST_ROUND, RESTORE
from fedspan.remote.messages import (
    EVALUATE,
    Agreement,
    Channel,
    DroppedError,
    RoundMessage,
    check_arrays,
    mark_of,
    under,
)
from fedspan.remote.sites import LATE, MODEL, MOST, answers, is_evaluation
from fedspan.replies.chain import OUTSIDE, Chain, Event, Places, Replies
from fedspan.replies.clip import clipped, leaked
from fedspan.replies.fixed_point import FixedPoint, clipped_values

ROOM = 1024  # bytes per array of a reply for its name and header
LONGEST_DELAY = 60.0  # seconds between two attempts at a round
echoed = operator.attrgetter("t", "client", "accepted", "mark")  # what a reply repeats


# of the clients whose replies count: places in the cohort, message, buffers; or why none counts
Came = tuple[Places, Any, Vector | None] | str


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
    backup: bool = True  # whether to keep a copy of every client's state
    copies_dir: InitVar[Path | None] = None  # directory for these copies; None: memory
    resume: InitVar[bool] = False  # whether an earlier process left its copies in `copies_dir`
    agreed: wire.Arrays = field(default_factory=dict)  # sent to clients that may not have it yet

    def __post_init__(
        self, x0: Vector, clients: int, copies_dir: Path | None, resume: bool
    ) -> None:
        self.accepted = np.zeros(clients, np.int64)  # updates per client
        self.marks = np.zeros(clients, np.int64)  # of the last of them
        self._x0 = x0.new_zeros(()).expand(1, *x0.shape[1:])
        self.first = without_zeros(self.method.init_client(self._x0, self.layout))
        self.over = False  # whether the last round cannot be tried again
        self._expected = dict[tuple[int, ...], wire.Arrays]()  # by the sizes of the download
        self._used = set[bytes]()  # public keys of secure sums
        if type(self.method).update_client_state is Method.update_client_state:
            # refuses a state of which nothing says what a reply does to it, before round 0
            self.method.update_client_state(self.first, Bundle(), Bundle(), cast(Any, None))
        # Copies follow from the accepted replies. Private fields of a state cannot be copied: they start again.
        without = self.method.private if self.backup else tuple(vars(self.first))
        self.copies = ClientStates(
            self.first, clients, copies_dir, resume=resume, own=True, without=without
        )

    def exchange(self, rnd: Round, down: Any, buffers: Vector | None, chain: Chain) -> Replies:
        """Do a round with the clients that reply well; with too few of them it is tried again for a while."""
        self.rnd, self.down, self.masked = rnd, down, chain.secure is not None
        self.extra = wire.Arrays() if buffers is None else {BUFFERS: buffers}
        self.sent = Counter[int]()  # payload bytes to each client
        self.events = list[Event]()
        began, delay = time.monotonic(), min(1.0, self.pause / 100)
        while True:
            # of this attempt: payload bytes from each client, and the mark of its reply
            self.received, self.replied = Counter[int](), dict[int, int]()
            came = self._secure_round(chain) if self.masked else self._round(chain)
            if isinstance(came, str):
                self.events.append(Event("other", None, f"{came}; nothing counted"))
                came = np.array([], np.int64), None, buffers
            places, up, mean = came
            clients = rnd.ids[0, places].tolist()
            self.accepted[clients] += 1
            self.marks[clients] = [self.replied[client] for client in clients]
            if clients or not self.pause or self.over:
                sent = np.array([[self.sent[client] for client in rnd.ids[0].tolist()]])
                received = np.array([[self.received[client] for client in clients]])
                del self.down, self.extra  # else the model would be held until the next round
                return Replies(places, up, mean, sent, received, tuple(self.events))
            if time.monotonic() - began > self.pause:
                last = "; ".join(event.text for event in self.events[-2:])
                raise ResumableError(
                    f"round {rnd.t} had fewer than {self.min_replies} accepted replies for {self.pause:g} s "
                    f"({last}); resume the run when the clients are back"
                )
            time.sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY)

    def _places(self, *clients: int) -> Places:
        """The places of clients in the cohort, in order."""
        return np.flatnonzero(np.isin(self.rnd.ids[0], clients))

    def _round(self, chain: Chain) -> Came:
        """A round whose replies the server can read."""
        rnd, ids = self.rnd, self.rnd.ids[0]
        like = self._expect(rnd, self.down, self.extra)
        came = self._ask("train", {client: {} for client in ids.tolist()}, like)
        places = self._places(*came)
        if chain.factor is not None:
            for client in ids[places].tolist():
                chain.came(_opened(came[client]), came[client].get(BUFFERS))
            for row, event in chain.all_came(rnd.subset(places)):
                came.pop(int(ids[places[row]]), None)
                self.events.append(event)
            places = self._places(*came)
        if len(places) < self.min_replies:
            return f"{len(places)} of {len(ids)} replies, fewer than {self.min_replies}"
        replies, beside = chain.gathering(rnd.subset(places)), []
        for number, place in enumerate(places.tolist()):
            # one at a time: a large reply is not kept beside the mean
            arrays = came.pop(int(ids[place]))
            beside += [arrays[BUFFERS]] if BUFFERS in arrays else []
            up = _opened(arrays)
            self._copy(place, up)
            replies.add(number, up)
            del arrays, up
        return places, replies.reply(), torch.cat(beside, 1) if beside else None

    def _secure_round(self, chain: Chain) -> Came:
        """A round of which the server learns the sum alone."""
        from fedspan.replies.secure.server import SecureSum

        assert chain.secure is not None
        rnd, ids = self.rnd, self.rnd.ids[0].tolist()
        like = self._expect(rnd, self.down, self.extra)
        weights = None
        if rnd.weights is not None:
            weights = dict(zip(ids, rnd.weights[0, :, 0].tolist(), strict=True))
        one = SecureSum(
            ids,
            1 + sum(array.numel() for array in like.values()),
            chain.secure,
            self._ask,
            self._used,
            weights=weights,
            about=f"{rnd.t} {self.agreement.fingerprint}",
        )
        one.threshold = max(one.threshold, self.min_replies)
        few = ""
        try:
            survivors, total = one.run()
        except ProtocolError as error:
            few = str(error)
        self.over = bool(few) and one.asked == "unmask"  # clients help to open a round once
        self.events += [Event("refused", client, text) for client, text in one.events]
        if few:
            return few
        fixed = FixedPoint.of(chain.secure, self.method.statistics)
        totals, clipped = fixed.split(total, like)
        factors = sum(one.factors[client] for client in survivors)
        mean = fixed.mean(totals, factors, len(survivors), like)
        if clipped:
            self.events.append(Event("other", None, clipped_values(clipped, chain.secure)))
        buffers = self.extra[BUFFERS] + mean.pop(BUFFERS) if BUFFERS in mean else None
        places = self._places(*survivors)
        return places, weighted(wire.unpack(mean), rnd.subset(places)), buffers

    # one question to some clients

    def _ask(
        self,
        question: str,
        messages: dict[int, wire.Arrays],
        expected: wire.Arrays,
    ) -> dict[int, wire.Arrays]:
        """The replies to a question that are as they must be; a client that lost its state gets a second message.

        Whatever goes wrong with one reply is that client's failure, never the run's: it becomes an event.

        Args:
            question: Such as "train", with which the download is sent.
            messages: The arrays of the question, by client.
            expected: A reply as it must look.
        """
        train, again = question == "train", False
        begins = question == "keys" and bool(self.agreed)  # what was agreed on comes before it
        replies, heard, clients = dict[int, wire.Arrays](), set[int](), [*messages]
        most = sum(ROOM + array.nbytes for array in expected.values())
        while clients:
            asked, lost = list[RoundMessage](), list[int]()
            for client in clients:
                arrays = messages[client]
                try:
                    if train:
                        arrays = self._download(client, again) | self.extra | arrays
                    elif begins and (again or not self.accepted[client]):
                        arrays = self.agreed | arrays
                except ProtocolError as error:
                    if not again:
                        raise
                    text = f"cannot be brought back: {error}"
                    self.events.append(Event("other", client, text))
                    continue
                message = RoundMessage(
                    question, self.rnd.t, client, int(self.accepted[client]), self.agreement.fingerprint,
                    arrays, mark=int(self.marks[client]), max_reply=most,
                )  # fmt: skip
                self.sent[client] += message.bytes
                asked.append(message)
            for index, reply in self.channel.deliver(asked):
                message = asked[index]
                client = message.client
                heard.add(client)
                try:
                    if isinstance(reply, DroppedError):
                        self.sent[client] -= 0 if reply.sent else message.bytes
                        raise reply
                    arrays = self._read(message, reply, expected)
                    if client in replies:
                        raise DroppedError("a second reply was dropped", "other")
                    replies[client] = arrays
                    self.received[client] += reply.bytes
                    if train:
                        self.replied[client] = mark_of(reply.arrays)
                except DiskError:
                    raise
                except Exception as error:
                    kind, why = "refused", f"reply refused: {one_line(error)}"
                    if isinstance(error, DroppedError):
                        kind, why = error.kind, one_line(error)
                    if (
                        (train or begins)
                        and kind == "state lost"
                        and not again
                        and client not in lost
                    ):
                        lost.append(client)
                    self.events.append(Event(kind, client, why))
            clients, again = lost, True
        late = f"no answer to {question!r} in time" if self.masked else LATE
        self.events += [
            Event("no reply", client, late) for client in messages if client not in heard
        ]
        return replies

    def _read(
        self, message: RoundMessage, reply: RoundMessage, expected: wire.Arrays
    ) -> wire.Arrays:
        """The arrays of a reply, clipped; raises where it is refused.

        A masked reply cannot be tried, and has no norm: clients clip before they mask.
        """
        if reply.status in ("refused", "failed"):
            raise DroppedError(f"{reply.status}: {self.agreement.explain(reply)}", reply.status)
        if echoed(reply) != echoed(message):
            raise DroppedError(f"a reply to another message (round {reply.t}) was dropped", "other")
        if reply.status == "lost":
            raise DroppedError(f"state lost: {reply.reason}", "state lost")
        if reply.status != "ok":
            raise DroppedError(f"a reply of status {reply.status!r} was dropped", "other")
        arrays = reply.arrays
        self.agreement.check(reply)
        check_arrays(arrays, expected)
        wrong = outside(self.method.statistics, arrays)
        if wrong is not None and wrong.any():
            raise ProtocolError(OUTSIDE)
        if self.masked:
            return arrays
        rnd = self.rnd.subset(self._places(message.client))
        if rnd.privacy is not None:  # clients may not keep to it
            clip = rnd.privacy.clip if BUFFERS not in arrays else float(message.arrays[BUFFERS])
            arrays = arrays | wire.pack(clipped(_opened(arrays), clip)[0])
        if not all(array.is_floating_point() for array in arrays.values()):
            try:  # whole numbers may point outside a vector
                self.method.server_step(self._first_server, _opened(arrays), rnd)
            except Exception as error:
                raise ProtocolError(f"it cannot be decoded ({one_line(error, 80)})") from None
        return arrays

    @functools.cached_property
    def _first_server(self) -> Any:
        return self.method.init_server(self._x0, self.layout)

    # the clients' states

    def _download(self, client: int, restore: bool) -> wire.Arrays:
        """What a client is sent; with `restore` x in full, and what brings its lost state back."""
        place = int(self._places(client)[0])
        if not restore:
            first = {} if self.accepted[client] else self.agreed
            return wire.pack(wire.pick(self.down, place)) | first
        own = self.copies.take(np.array([client]), (1, 1))
        state = {f"{RESTORE}{name}": getattr(own, name) for name in self.copies.tables}
        last_round = int(self.rnd.last_round[0, place]) if self.backup else -1
        state[f"{RESTORE}{LAST_ROUND}"] = torch.tensor([last_round])
        words = "re-enters with an empty state: there is no copy of it"
        if self.backup:
            private = "".join(f"; {name} starts again" for name in self.method.private)
            words = f"state restored from the server's copy{private}"
        self.events.append(Event("restored", client, words))
        down = wire.pick(dated(self.down, place, last_round), place, full=True)
        return wire.pack(down) | state | self.agreed

    def _copy(self, place: int, up: Any) -> None:
        """Renews the copy of a client's state by its reply."""
        if not self.copies.tables:
            return
        here = np.array([place])
        one = self.rnd.subset(here)
        old = leaked(self.method, self.copies.take(one.ids[0], (1, 1)), one)
        new = self.method.update_client_state(old, wire.of_clients(self.down, here), up, one)
        self.copies.put(one.ids[0], new)

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
        model = {MODEL: run.model().reshape(-1)}
        if run.buffers is not None:
            model[BUFFERS] = run.buffers.reshape(-1)
        messages = [
            RoundMessage(
                EVALUATE, run.t, client, 0, self.agreement.fingerprint,
                model | ({} if count else self.agreed), max_reply=MOST,
            )
            for client, count in enumerate(self.accepted)
        ]  # fmt: skip
        found, missing = answers(self.channel, messages, is_evaluation)
        if missing:
            run.note([one._replace(text=f"not evaluated: {one.text}") for one in missing.values()])
        rows = []
        for client, one in sorted(found.items()):
            about = {"client": run.problem.names[client]}
            about |= {name: one[name] for name in ("data", "examples")}
            metrics = {k: math.nan if v is None else v for k, v in one["metrics"].items()}
            rows.append((about | metrics, one["summaries"]))
        return rows

    def save(self) -> wire.Arrays:
        """The number of accepted updates per client, the mark of the last one, and the copies of their states."""
        copies = self.copies.save().items()
        return self._counts() | {f"copy.{name}": array for name, array in copies}

    def _counts(self) -> wire.Arrays:
        return {
            "accepted": torch.from_numpy(self.accepted),
            "marks": torch.from_numpy(self.marks),
        }

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
