"""The server's end of a run across machines: a Transport over any link that carries letters.

The round goes on with whoever replied well. A reply is counted when it comes first, in its own round, from a client
that computes the same thing, and with finite numbers of the right shape; anything else becomes an event in words. A
client that lost its state is sent it again: from the server's own copy, which follows from the replies it has
accepted, or as a newcomer's. Private fields of a state, which no reply tells, begin anew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from fedspan.core import wire
from fedspan.core.errors import ProtocolError, SpecError, at_least, one_of
from fedspan.core.layout import Layout, Vector
from fedspan.core.method import Method, Round, private_fields, restorable
from fedspan.core.objective import Flat
from fedspan.core.registry import name_of
from fedspan.core.sync import SyncedDown
from fedspan.engine.loop import Replies
from fedspan.engine.states import InMemory, OnDisk, States
from fedspan.engine.worker import BUFFERS
from fedspan.remote.client import LAST_ROUND, RESTORE
from fedspan.remote.messages import CASTS, RoundMessage, fingerprint, restored, same_shapes


class Unsent(str):
    """Why a letter has not been sent at all."""


class Link(Protocol):
    """Carries letters to clients and brings back what they reply."""

    def deliver(self, messages: list[RoundMessage]) -> Iterator[tuple[int, RoundMessage | str]]:
        """(number of the letter, its reply or what went wrong), as they come; ends when no more are waited for."""


@dataclass(frozen=True)
class Event:
    """What goes into the events of a run."""

    client: int
    what: str

    def __str__(self) -> str:
        return f"client {self.client}: {self.what}"


class Server:
    """A Transport whose other end is wherever the link leads."""

    def __init__(
        self,
        method: Method[Any, Any, Any, Any],
        layout: Layout,
        x0: Vector,
        clients: int,
        link: Link,
        seed: int,
        *,
        minimum: int = 1,
        cast: str = "float32",
        backup: bool = True,
        folder: Path | None = None,
        resume: bool = False,
        on_round: Callable[[Round, Replies], None] | None = None,
    ) -> None:
        at_least("minimum", minimum, 1)
        one_of("cast", cast, CASTS)
        self.memory = restorable(method)
        self.private = private_fields(method)
        if self.private and CASTS[cast] is not None:
            raise SpecError(
                f"cast {cast!r} rounds a reply after {name_of(method)} has noted what it keeps to itself; use 'float32'"
                + (", and {name = 'cast'} as its compressor" if hasattr(method, "compressor") else "")
            )
        self.method, self.layout, self.link, self.minimum, self.cast = method, layout, link, minimum, cast
        self.mark = fingerprint(method, layout, seed)
        self.acked = np.zeros(clients, np.int64)
        self.on_round = on_round
        self.first = method.init_client(x0[:1], layout)
        self._wanted: dict[tuple[int, ...], wire.Arrays] = {}  # by the sizes of the download
        self._copies: dict[str, States] | None = None
        if backup:
            held = [f.name for f in dataclasses.fields(self.first) if getattr(self.first, f.name).numel()]
            names = [name for name in held if name not in self.private]
            self._copies = {name: self._copy(name, clients, folder, resume) for name in names}

    def _copy(self, name: str, clients: int, folder: Path | None, resume: bool) -> States:
        first = getattr(self.first, name)[0]
        if folder is None:
            return InMemory(first, clients)
        return OnDisk(folder / f"{name}.states", first, clients, first.dtype, resume=resume)

    def exchange(self, rnd: Round, down: Any, buffers: Vector | None) -> Replies:
        """One round of letters; those whose state is lost get a second one that brings it back."""
        found = self._exchange(rnd, down, buffers)
        if self.on_round is not None:
            self.on_round(rnd, found)
        return found

    def _exchange(self, rnd: Round, down: Any, buffers: Vector | None) -> Replies:
        ids = rnd.ids[0].tolist()
        beside = {} if buffers is None else {BUFFERS: buffers}
        wanted, events = self._template(rnd, down, buffers), list[Event]()
        messages = [self._letter(rnd, place, wire.pack(wire.pick(down, place)) | beside) for place in range(len(ids))]
        found: dict[int, RoundMessage] = {}
        lost = self._collect(messages, list(range(len(ids))), wanted, found, events)
        again = [(place, self._restore(rnd, place, down, beside, events)) for place in lost]
        second = [(place, message) for place, message in again if message is not None]
        if second:
            self._collect([message for _, message in second], [place for place, _ in second], wanted, found, events)
        unsent = {told.client for told in events if isinstance(told.what, Unsent)}
        sent = np.array([0 if message.client in unsent else message.bytes for message in messages])
        for place, message in second:
            sent[place] += message.bytes
        for place, client in enumerate(ids):
            if place not in found and all(told.client != client for told in events):
                events.append(Event(client, "no reply in time"))
        said = tuple(f"round {rnd.t}: {told}" for told in events)
        if len(found) < self.minimum:
            few = f"round {rnd.t}: {len(found)} of {len(ids)} replies, fewer than {self.minimum}; nothing counted"
            return Replies(np.array([], np.int64), None, buffers, sent[None], events=(*said, few))
        return self._accepted(rnd, down, found, sent, said)

    def _letter(self, rnd: Round, place: int, arrays: wire.Arrays) -> RoundMessage:
        client = int(rnd.ids[0, place])
        return RoundMessage("train", rnd.t, client, int(self.acked[client]), self.mark, arrays, cast=self.cast)

    def _collect(
        self,
        messages: list[RoundMessage],
        places: list[int],
        wanted: wire.Arrays,
        found: dict[int, RoundMessage],
        events: list[Event],
    ) -> list[int]:
        """Take in replies as they come; the places whose client has lost its state."""
        lost = []
        for number, reply in self.link.deliver(messages):
            message, place = messages[number], places[number]
            if isinstance(reply, str):
                events.append(Event(message.client, reply))
            elif reply.status in ("refused", "failed"):
                events.append(Event(message.client, f"{reply.status}: {reply.reason}"))
            elif (reply.t, reply.client, reply.seq) != (message.t, message.client, message.seq):
                events.append(Event(message.client, f"a reply to another letter (round {reply.t}) was dropped"))
            elif place in found:
                events.append(Event(message.client, "a second reply was dropped"))
            elif reply.status == "lost":
                events.append(Event(message.client, f"state lost: {reply.reason}"))
                lost.append(place)
            elif reply.status != "ok":
                events.append(Event(message.client, f"a reply of status {reply.status!r} was dropped"))
            else:
                try:
                    reply.matches(self.mark)
                    arrays = restored(reply.arrays, self.cast, self.layout.dtype)
                    same_shapes(arrays, wanted)
                    found[place] = reply
                except ProtocolError as error:
                    events.append(Event(message.client, f"reply refused: {error}"))
        return lost

    def _restore(
        self, rnd: Round, place: int, down: Any, beside: wire.Arrays, events: list[Event]
    ) -> RoundMessage | None:
        """A letter that brings a client's state back, and x whole."""
        client, last_round = int(rnd.ids[0, place]), int(rnd.last_round[0, place])
        brought: wire.Arrays = {}
        if self._copies is not None:
            row = np.array([client])
            brought = {f"{RESTORE}{name}": states.take(row).unsqueeze(0) for name, states in self._copies.items()}
            anew = f"; {', '.join(self.private)} begins anew" if self.private else ""
            events.append(Event(client, f"state restored from the server's copy{anew}"))
        else:
            last_round = -1
            events.append(Event(client, "re-enters with an empty state: there is no copy of it"))
        brought[f"{RESTORE}{LAST_ROUND}"] = torch.tensor([last_round])
        try:
            arrays = wire.pack(
                wire.pick(down.dated(place, last_round) if isinstance(down, SyncedDown) else down, place, full=True)
            )
        except ProtocolError as error:
            events.append(Event(client, f"cannot be brought back: {error}"))
            return None
        return self._letter(rnd, place, arrays | brought | beside)

    def _accepted(
        self,
        rnd: Round,
        down: Any,
        found: dict[int, RoundMessage],
        sent: npt.NDArray[np.int64],
        events: tuple[str, ...],
    ) -> Replies:
        places = np.array(sorted(found))
        replies = [restored(found[place].arrays, self.cast, self.layout.dtype) for place in places.tolist()]
        kind = self.method.types()[3]
        up: Any = wire.gather([wire.unpack(kind, {k: v for k, v in r.items() if k != BUFFERS}) for r in replies])
        buffers = torch.cat([r[BUFFERS] for r in replies], 1) if BUFFERS in replies[0] else None
        here = rnd.subset(places)
        if self._copies and self.memory is not None:
            rows = here.ids[0]
            old = {name: states.take(rows).unsqueeze(0) for name, states in self._copies.items()}
            there = down.subset(places) if isinstance(down, SyncedDown) else down
            new = self.memory.update_client_state(replace(self.first, **old), there, up, here)
            for name, states in self._copies.items():
                states.put(rows, getattr(new, name)[0])
        self.acked[here.ids[0]] += 1
        received = np.array([[found[place].bytes for place in places.tolist()]])
        return Replies(places, up, buffers, sent[None], received, events)

    def _template(self, rnd: Round, down: Any, buffers: Vector | None) -> wire.Arrays:
        """A reply as it must look, from the method's own step on an objective that is flat.

        To downloads of the same sizes replies are of the same shapes; a method whose rounds take turns has several.
        """
        sizes = tuple(value.numel() for value in vars(down).values() if isinstance(value, torch.Tensor))
        if sizes not in self._wanted:
            alone = rnd.subset(np.array([0]))
            _, up = self.method.client_step(self.first, down, Flat(), alone)
            self._wanted[sizes] = wire.pack(up) | ({} if buffers is None else {BUFFERS: buffers})
        return self._wanted[sizes]

    def save(self) -> wire.Arrays:
        """How many updates of each client are counted, and the copies of their states."""
        copies = (
            {} if self._copies is None else {f"copy.{name}": states.save() for name, states in self._copies.items()}
        )
        return {"acked": torch.from_numpy(self.acked)} | copies

    def load(self, arrays: wire.Arrays) -> None:
        """Go back to what `save` gave."""
        self.acked = arrays["acked"].numpy().copy()
        for name, states in (self._copies or {}).items():
            if f"copy.{name}" not in arrays:
                raise SpecError("the checkpoint was made without copies of the clients' states; resume with backup off")
            states.load(arrays[f"copy.{name}"])
