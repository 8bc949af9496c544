"""A client on its own machine: its state on disk in two versions, and its answer to a letter of the server.

The file of a client holds what it was before its last round and what it was after. The server's count of accepted
updates (`seq`) says which of the two is live: an update that never arrived rolls back by itself, and one that was
counted is never lost.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedspan.core import checkpoint, wire
from fedspan.core.errors import CheckpointError, DataError, ProtocolError, SpecError
from fedspan.core.method import Method, Round, restorable
from fedspan.core.objective import Problem
from fedspan.engine.worker import BUFFERS, Replica, answer, opened
from fedspan.remote.messages import REASON, RoundMessage, fingerprint, restored, rounded

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
RESTORE, LAST_ROUND = "restore.", "last_round"  # arrays under this name bring back a lost state, and the round it is of


class LostError(Exception):
    """The state that the server counts on is not there."""


@dataclass(frozen=True)
class Store:
    """Two versions of one client's state in one file."""

    path: Path

    @staticmethod
    def of(folder: Path, run: str, client: str) -> Store:
        """The file of a client in a run; neither name can lead out of the folder."""
        for what, name in (("run", run), ("client id", client)):
            if not NAME.fullmatch(name):
                raise SpecError(
                    f"{what} {name!r:.80} must be 1 to 64 letters, digits, '.', '_' or '-', and not begin with '.'"
                )
        place = folder / run
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"cannot keep states in {str(place)!r}: {error.strerror}") from None
        return Store(place / f"{client}.safetensors")

    def load(self, seq: int, kind: type, mark: str) -> Replica:
        """The version after `seq` accepted updates; raises LostError where it is missing, damaged or of another run."""
        try:
            arrays, meta = checkpoint.load(self.path)
        except CheckpointError as error:
            raise LostError(str(error)) from None
        if meta["fingerprint"] != mark:
            raise LostError(f"the state on disk is of another method, model or seed ({meta['fingerprint']})")
        if seq not in meta["seqs"]:
            raise LostError(f"the state on disk is after {meta['seqs']} updates, the server counts {seq}")
        number = meta["seqs"].index(seq)
        own = {k.removeprefix(f"{number}."): v for k, v in arrays.items() if k.startswith(f"{number}.")}
        state: Any = wire.unpack(kind, {k.removeprefix("state."): v for k, v in own.items() if k.startswith("state.")})
        return Replica(state, own.get("x"), meta["last_round"][number])

    def save(self, seq: int, before: Replica, after: Replica, mark: str) -> None:
        """Write both versions, in one step that survives a crash; x only where the server sends changes of it."""
        arrays: wire.Arrays = {}
        for number, one in enumerate((before, after)):
            arrays |= {f"{number}.state.{k}": v for k, v in wire.pack(one.state).items()}
            arrays |= {} if one.x is None else {f"{number}.x": one.x}
        last_round = [before.last_round, after.last_round]
        checkpoint.save(self.path, arrays, {"fingerprint": mark, "seqs": [seq, seq + 1], "last_round": last_round})


@dataclass(frozen=True, eq=False)
class Client:
    """One client's end: what it computes with, and where it keeps its state."""

    method: Method[Any, Any, Any, Any]
    problem: Problem
    store: Store
    client: int
    seed: int

    def answer(self, message: RoundMessage) -> RoundMessage:
        """Do a round's work; whatever goes wrong becomes a letter that says so."""
        mark = fingerprint(self.method, self.problem.layout, self.seed)
        reply = replace(message, fingerprint=mark, arrays={})
        try:
            message.matches(mark)
            if message.client != self.client:
                raise ProtocolError(f"the message is for client {message.client}, this is client {self.client}")
            arrays = self._work(message, mark)
        except LostError as error:
            return replace(reply, status="lost", reason=str(error)[:REASON])
        except ProtocolError as error:
            return replace(reply, status="refused", reason=str(error)[:REASON])
        except Exception as error:
            return replace(reply, status="failed", reason=f"{type(error).__name__}: {error}"[:REASON])
        return replace(reply, status="ok", arrays=arrays)

    def _work(self, message: RoundMessage, mark: str) -> wire.Arrays:
        before, down = self._replica(message, mark), self._down(message)
        rnd = Round(
            t=message.t,
            seeds=(self.seed,),
            clients=self.problem.clients,
            layout=self.problem.layout,
            ids=np.array([[self.client]]),
            last_round=np.array([[before.last_round]]),
            local_steps=self.method.local_steps,
        )
        after, up = answer(self.method, self.problem, before, down, rnd)
        sent = rounded(up, message.cast)
        if sent is not up:  # the client must go by the rounded numbers too, as the server will
            there = restored(sent, message.cast, self.problem.layout.dtype)
            after = replace(after, state=settled(self.method, before, down, there, rnd))
        self.store.save(message.seq, before, after, mark)
        return sent

    def _down(self, message: RoundMessage) -> wire.Arrays:
        return {name: array for name, array in message.arrays.items() if not name.startswith(RESTORE)}

    def _replica(self, message: RoundMessage, mark: str) -> Replica:
        brought = {k.removeprefix(RESTORE): v for k, v in message.arrays.items() if k.startswith(RESTORE)}
        kind = self.method.types()[1]
        if brought:
            last_round = int(brought.pop(LAST_ROUND))
            fresh = wire.pack(self.method.init_client(self.problem.x0, self.problem.layout))
            return Replica(wire.unpack(kind, fresh | brought), None, last_round)
        if message.seq == 0:
            return Replica(self.method.init_client(self.problem.x0, self.problem.layout))
        return self.store.load(message.seq, kind, mark)


def settled(method: Method[Any, Any, Any, Any], before: Replica, down: wire.Arrays, up: wire.Arrays, rnd: Round) -> Any:
    """A client's state after a reply as it arrived."""
    memory = restorable(method)
    if memory is None:
        return before.state
    reply: Any = wire.unpack(method.types()[3], {k: v for k, v in up.items() if k != BUFFERS})
    return memory.update_client_state(before.state, opened(method, before, down, rnd), reply, rnd)
