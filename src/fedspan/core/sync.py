"""How a client gets x when only r values are sent per round.

A client keeps its copy of x and the round it is from. The server keeps a `Log` of the changes of x in the last rounds,
each as it is sent: r values in the subspace of its round, or a compressed change. It sends the changes that the client
missed, or x in full when that is fewer bytes or the client is new. A client that has the initial x by itself counts as
one whose copy is from round 0. `ModelSync` is this download for a whole cohort. In one process `x` is simply there.
Over a network, `pick` selects what one client is sent and `open` rebuilds x there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch

from fedspan.core.bundle import Bundle
from fedspan.core.encoded import Encoded
from fedspan.core.errors import ProtocolError
from fedspan.core.layout import Arrays, Bools, Ints, Vector
from fedspan.core.round import Round

Entry = Vector | Encoded  # all entries of a log are of one kind and length
Keep = Literal["none", "first", "all"]
Needed = Callable[[Collection[int]], Collection[int]]  # rounds → those some client needs
Apply = Callable[[Vector, Any, int], Vector]  # (copy, entry, round) → the copy after that round
MISSED = "missed"


@dataclass(frozen=True, eq=False)
class Log:
    """Changes of x in rounds `end - len(entries)` … `end - 1`, each as it is sent, and some of earlier rounds."""

    entries: tuple[Entry, ...] = ()  # the changes of the last rounds, oldest first
    end: int = 0  # the round after the last change
    earlier: Mapping[int, Entry] = field(default_factory=dict)  # changes that some clients need

    def push(self, entry: Entry, keep: int, needed: Needed | None = None) -> Log:
        """Return the log with one more round, cut to the last `keep` and to earlier ones that are needed."""
        entries, earlier = (*self.entries, entry), dict[int, Entry]()
        if needed is not None:
            gone = dict(enumerate(entries[:-keep], self.end - len(self.entries)))
            before = {**self.earlier, **gone}
            earlier = {t: before[t] for t in sorted(needed(before))}
        return Log(entries[-keep:], self.end + 1, earlier)

    def at(self, t: int) -> Any:
        """Return the change made in round t."""
        if t in self.earlier:
            return self.earlier[t]
        index = t - self.end + len(self.entries)
        if not 0 <= index < len(self.entries):
            raise ProtocolError(
                f"the change of round {t} is not in the log, which ends before round {self.end}"
            )
        return self.entries[index]

    def arrays(self) -> Arrays:
        """Return all entries in one array, or one per part of compressed ones: a checkpoint's header stays small."""
        end = torch.tensor([self.end, *self.earlier])
        return {"end": end, **_joined((*self.earlier.values(), *self.entries))}

    @staticmethod
    def from_arrays(arrays: Arrays) -> Log:
        """Return the log of some arrays."""
        rounds = arrays["end"]
        if rounds.dtype != torch.int64 or rounds.dim() != 1:
            raise ProtocolError(
                f"the rounds of a log are of type {rounds.dtype} {tuple(rounds.shape)}"
            )
        end, *earlier = rounds.tolist()
        entries = _apart(arrays, "end")
        last = entries[len(earlier) :]
        before = dict(zip(earlier, entries, strict=False))
        if len(before) < len(earlier) or max(earlier, default=-1) >= end - len(last):
            raise ProtocolError("a log has not as many changes as it says")
        return Log(last, end, before)


@dataclass(frozen=True, eq=False)
class ModelSync:
    """What each client of a cohort lacks of x.

    Args:
        keep: The log entries that a client is sent even if it gets x in full: none, that of the round in which it last
            took part ("first"), or all that it missed.
    """

    x: Vector | None  # the server's; at a client on its own machine only if it was sent in full
    log: Log  # the changes of x in the last rounds
    last_round: Ints  # (runs, clients): the round in which each one last took part, -1 for none
    keep: Keep = "none"
    known_start: bool = False  # whether new clients have a copy from round 0

    @staticmethod
    def of(x: Vector, log: Log, rnd: Round, keep: Keep = "none") -> ModelSync:
        """Return what the clients of a round lack of x."""
        return ModelSync(x, log, rnd.last_round, keep, rnd.known_start)

    @property
    def model(self) -> Vector:
        """x as the cohort has it once it has all changes."""
        if self.x is None:
            raise ProtocolError(
                "this download holds only changes of the model; `open` it with the client's copy first"
            )
        return self.x

    @property
    def sent(self) -> tuple[Bools, Ints]:
        """Who gets x in full, and how many log entries each client is sent.

        New clients get x, and those for whom it is fewer bytes than the changes they missed.
        """
        log, last = self.log, self.last_round
        began = np.maximum(last, 0)  # the round of the first change that a client lacks
        copies = began if self.known_start else last
        if self.keep == "all" or not log.entries:
            full = copies < 0
        else:
            # an entry of the first round is sent even beside x, but to a new client
            beside = (last >= 0) & (self.keep == "first")
            reach = bytes_of(self.model) // bytes_of(log.entries[-1]) + beside
            full = copies < log.end - np.minimum(reach, len(log.entries))
        missed: Ints = log.end - began
        if self.keep != "all":
            missed[full] = last[full] >= 0 if self.keep == "first" else 0
        return full, missed

    def sizes(self) -> Ints:
        """Return the bytes sent to each client, (runs, clients)."""
        full, missed = self.sent
        entry = bytes_of(self.log.entries[-1]) if self.log.entries else 0
        return full * bytes_of(self.model) + missed * entry

    def pick(self, client: int, full: bool = False) -> ModelSync:
        """Return what is sent to one client of a single run; `full` sends x in any case."""
        own, (gets_x, missed) = self.last_round[:, client : client + 1], self.sent
        last, entries = int(own[0, 0]), int(missed[0, client])
        start = max(last, 0)
        if full and self.keep != "all":
            entries = self.keep == "first" and last >= 0
        end = start + entries
        log = Log(tuple(self.log.at(t) for t in range(start, end)), end)
        x = self.x if full or gets_x[0, client] else None
        return replace(self, x=x, log=log, last_round=own)

    def arrays(self) -> Arrays:
        """Return what is sent to one client: x, or the missed entries, or both; no entries are an empty array."""
        x = {} if self.x is None else {"x": self.x}
        return x | _joined(self.log.entries) or {MISSED: torch.empty(1, 0, 0)}

    @staticmethod
    def from_arrays(arrays: Arrays) -> ModelSync:
        """Return the download of some arrays. Only the client knows the round of its copy: `open` fills it in."""
        entries = _apart(arrays, "x")
        return ModelSync(arrays.get("x"), Log(entries, len(entries)), np.array([[-1]]))

    def open(self, copy: Vector | None, last_round: int, apply: Apply) -> ModelSync:
        """Return the download with x rebuilt, at a client with a copy of x from round `last_round`."""
        start, x = max(last_round, 0), self.x
        if x is None:
            if copy is None:
                raise ProtocolError(
                    "the server sent changes of the model, but this client has no copy to apply them to"
                )
            x = copy
            for t, entry in enumerate(self.log.entries, start):
                x = apply(x, entry, t)
        log = Log(self.log.entries, start + len(self.log.entries))
        return replace(self, x=x, log=log, last_round=np.array([[last_round]]))


def opened(down: Bundle, copy: Vector | None, last_round: int, apply: Apply) -> Bundle:
    """Return the download, at a client, with x rebuilt from the client's copy."""
    sync = down.get("sync")
    return down if sync is None else down.replace(sync=sync.open(copy, last_round, apply))


def dated(down: Bundle, place: int, last_round: int) -> Bundle:
    """Return the download with another date for the copy of the client at one place of a single run."""
    if (sync := down.get("sync")) is None:
        return down
    dates = sync.last_round.copy()
    dates[0, place] = last_round
    return down.replace(sync=replace(sync, last_round=dates))


def bytes_of(entry: Entry) -> int:
    """Return the bytes that an entry takes in a message."""
    return entry.bytes if isinstance(entry, Encoded) else entry.shape[-1] * entry.itemsize


def _joined(entries: tuple[Any, ...]) -> Arrays:
    """Return entries one after the other along the axis of clients; each part of compressed ones by itself."""
    if not entries:
        return {}
    if isinstance(entries[0], torch.Tensor):
        return {MISSED: torch.cat(entries, 1)}
    named = [entry.parts for entry in entries]
    return {f"{MISSED}.{name}": torch.cat([one[name] for one in named], 1) for name in named[0]}


def _apart(arrays: Arrays, beside: str) -> tuple[Entry, ...]:
    """Return the entries that `_joined` has joined; `beside` is an array that is none of theirs."""
    if MISSED in arrays:
        return tuple(arrays[MISSED].split(1, 1)) if arrays[MISSED].shape[1] else ()
    joined = {name: array for name, array in arrays.items() if name != beside}
    names = [name.removeprefix(f"{MISSED}.") for name in joined]
    of_rounds = zip(*(array.split(1, 1) for array in joined.values()), strict=True)
    return tuple(Encoded(**dict(zip(names, parts, strict=True))) for parts in of_rounds)
