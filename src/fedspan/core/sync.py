"""How a client gets x when only r numbers are sent per round.

A client keeps its copy of x and the round it is from. The server keeps a `Log` of the changes of x in the last rounds,
each as it is sent: r numbers in the subspace of its round, or a compressed change. It sends the changes that the client
missed, or x in full when that is fewer bytes or the client is new. A client that has the initial x by itself counts as
one whose copy is from round 0. `ModelSync` is this download for a whole cohort. In
one process `x` is simply there. Over a network, `pick` selects what one client is sent and `open` rebuilds x there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from fedspan.core.bundle import Bundle
from fedspan.core.encoded import Encoded
from fedspan.core.errors import ProtocolError
from fedspan.core.layout import Vector
from fedspan.core.round import Round

Entry = Vector | Encoded  # all entries of a log are of one kind and length
Keep = Literal["none", "first", "all"]
Needed = Callable[
    [Collection[int]], Collection[int]
]  # rounds → those whose change some client needs
Apply = Callable[[Vector, Any, int], Vector]  # (copy, entry, round) → the copy after that round


@dataclass(frozen=True, eq=False)
class Log:
    """Changes of x in rounds `end - len(entries)` … `end - 1`, each as it is sent, and some of earlier rounds."""

    entries: tuple[Entry, ...] = ()  # the changes of the last rounds, oldest first
    end: int = 0  # the round after the last change
    earlier: Mapping[int, Entry] = field(
        default_factory=dict
    )  # round → its change, for clients that need it alone

    def push(self, entry: Entry, keep: int, needed: Needed | None = None) -> Log:
        """The log with one more round, cut to the last `keep` and to earlier ones that are needed; none by default."""
        entries, earlier = (*self.entries, entry)[-keep:], dict[int, Entry]()
        if needed is not None:
            gone = self.entries[: len(self.entries) + 1 - len(entries)]
            before = {**self.earlier, **dict(enumerate(gone, self.end - len(self.entries)))}
            still = needed(before)
            earlier = {t: one for t, one in before.items() if t in still}
        return Log(entries, self.end + 1, earlier)

    def at(self, t: int) -> Any:
        """The change made in round t."""
        index = t - self.end + len(self.entries)
        if t not in self.earlier and not 0 <= index < len(self.entries):
            raise ProtocolError(
                f"the change of round {t} is not in the log, which ends before round {self.end}"
            )
        return self.entries[index] if index >= 0 else self.earlier[t]

    def arrays(self) -> dict[str, torch.Tensor]:
        """All entries in one array, or one per part of compressed ones, so that a checkpoint's header stays small."""
        return {
            "end": torch.tensor([self.end, *self.earlier]),
            **_joined((*self.earlier.values(), *self.entries)),
        }

    @staticmethod
    def from_arrays(arrays: dict[str, torch.Tensor]) -> Log:
        """The inverse of `arrays`."""
        if arrays["end"].dtype != torch.int64 or arrays["end"].dim() != 1:
            raise ProtocolError(
                f"the rounds of a log are of type {arrays['end'].dtype} {tuple(arrays['end'].shape)}"
            )
        end, *earlier = arrays["end"].tolist()
        entries = _apart({name: array for name, array in arrays.items() if name != "end"})
        last = entries[len(earlier) :]
        if (
            len(set(earlier)) < len(earlier)
            or len(entries) < len(earlier)
            or max(earlier, default=-1) >= end - len(last)
        ):
            raise ProtocolError("a log has not as many changes as it says")
        return Log(last, end, dict(zip(earlier, entries, strict=False)))


@dataclass(frozen=True, eq=False)
class ModelSync:
    """What each client of a cohort lacks of x.

    Args:
        keep: The log entries that a client is sent even if it gets x in full: none, that of the round in which it last
            took part ("first"), or all that it missed.
    """

    x: Vector | None  # the server's; at a client on its own machine only if it was sent in full
    log: Log  # the changes of x in the last rounds
    last_round: npt.NDArray[
        np.int64
    ]  # (runs, clients): the round in which each client last took part, -1 for none
    keep: Keep = "none"
    known_start: bool = False  # whether new clients have a copy from round 0

    @staticmethod
    def of(x: Vector, log: Log, rnd: Round, keep: Keep = "none") -> ModelSync:
        """What the clients of a round lack of x."""
        return ModelSync(x, log, rnd.last_round, keep, rnd.known_start)

    @property
    def copy_round(self) -> npt.NDArray[np.int64]:
        """The round of each client's copy, -1 for none."""
        return self.last_round.clip(min=0) if self.known_start else self.last_round

    @property
    def full(self) -> npt.NDArray[np.bool_]:
        """Who gets x in full: new clients, and those for whom it is fewer bytes than the changes they missed."""
        return self._too_old(self.copy_round)

    def _too_old(self, copies: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        log = self.log
        if not log.entries or self.keep == "all":
            return copies < 0
        model, kept = bytes_of(self.model), len(log.entries)
        old = copies < log.end - min(
            worth_sending(log.entries[-1], model, self.keep), kept
        )  # -1 is below any round
        if self.known_start and self.keep == "first":  # no entry is sent beside x to a new client
            new = copies < log.end - min(worth_sending(log.entries[-1], model), kept)
            return np.where(self.last_round < 0, new, old)
        return old

    @property
    def model(self) -> Vector:
        """x as the cohort has it once it has all changes."""
        if self.x is None:
            raise ProtocolError(
                "this download holds only changes of the model; `open` it with the client's copy first"
            )
        return self.x

    @functools.cached_property
    def entries_sent(self) -> npt.NDArray[np.int64]:
        """How many log entries are sent to each client."""
        gap = self.log.end - np.maximum(self.last_round, 0)
        if self.keep == "all":
            return gap
        extra = np.where(self.last_round < 0, 0, 1) if self.keep == "first" else 0
        return np.where(self.full, extra, gap)

    def sizes(self) -> npt.NDArray[np.int64]:
        """Bytes sent to each client, (runs, clients)."""
        entry, model = (
            bytes_of(self.log.entries[-1]) if self.log.entries else 0,
            bytes_of(self.model),
        )
        copies = self.copy_round
        full = self._too_old(copies)
        if self.keep == "none":
            return np.where(full, model, (self.log.end - copies) * entry)
        return full * model + self.entries_sent * entry

    def pick(self, client: int, full: bool = False) -> ModelSync:
        """What is sent to one client of a single run; `full` sends x in any case."""
        start, sent = max(int(self.last_round[0, client]), 0), int(self.entries_sent[0, client])
        if full and self.keep != "all":
            sent = int(self.keep == "first" and self.last_round[0, client] >= 0)
        entries = tuple(self.log.at(t) for t in range(start, start + sent))
        x = self.x if full or self.full[0, client] else None
        return replace(
            self,
            x=x,
            log=Log(entries, start + sent),
            last_round=self.last_round[:, client : client + 1],
        )

    def arrays(self) -> dict[str, Vector]:
        """What is sent to one client: x, or the missed entries in order, or both; no entries are an empty array."""
        missed = _joined(self.log.entries)
        if self.x is not None:
            return {"x": self.x, **missed}
        return missed or {MISSED: torch.empty(1, 0, 0)}

    @staticmethod
    def from_arrays(arrays: dict[str, Vector]) -> ModelSync:
        """The inverse of `arrays`. Only the client knows the round of its copy: `open` fills it in."""
        entries = _apart({name: array for name, array in arrays.items() if name != "x"})
        return ModelSync(arrays.get("x"), Log(entries, len(entries)), np.array([[-1]]))

    def open(self, copy: Vector | None, last_round: int, apply: Apply) -> ModelSync:
        """At a client with a copy of x from round `last_round`: rebuilds x."""
        start = max(last_round, 0)
        log = Log(self.log.entries, start + len(self.log.entries))
        x = self.x
        if x is None:
            if copy is None:
                raise ProtocolError(
                    "the server sent changes of the model, but this client has no copy to apply them to"
                )
            x = copy
            for t in range(start, log.end):
                x = apply(x, log.at(t), t)
        return replace(self, x=x, log=log, last_round=np.array([[last_round]]))


def opened(down: Bundle, copy: Vector | None, last_round: int, apply: Apply) -> Bundle:
    """At a client: return the download with x rebuilt from the client's copy."""
    sync = down.get("sync")
    return down if sync is None else down.replace(sync=sync.open(copy, last_round, apply))


def subset(down: Bundle, places: npt.NDArray[np.int64]) -> Bundle:
    """Return the download of some places of the cohort."""
    sync = down.get("sync")
    if sync is None:
        return down
    return down.replace(sync=replace(sync, last_round=sync.last_round[:, places]))


def dated(down: Bundle, place: int, last_round: int) -> Bundle:
    """Return the download with another date for the copy of the client at one place of a single run."""
    sync = down.get("sync")
    if sync is None:
        return down
    dates = sync.last_round.copy()
    dates[0, place] = last_round
    return down.replace(sync=replace(sync, last_round=dates))


def worth_sending(entry: Entry, model: int, keep: Keep = "none") -> int:
    """How many changes like `entry` take no more bytes than the model, and the entry that is sent even with it."""
    return model // bytes_of(entry) + (1 if keep == "first" else 0)


def bytes_of(entry: Entry) -> int:
    """Bytes that an entry takes in a message."""
    return entry.bytes if isinstance(entry, Encoded) else entry.shape[-1] * entry.itemsize


MISSED = "missed"


def _joined(entries: tuple[Entry, ...]) -> dict[str, torch.Tensor]:
    """Entries one after the other along the axis of clients; each part of compressed ones by itself."""
    named = [entry.parts if isinstance(entry, Encoded) else {"": entry} for entry in entries]
    joined = {
        name: torch.cat([parts[name] for parts in named], 1) for name in (named[0] if named else ())
    }
    return {f"{MISSED}.{name}" if name else MISSED: array for name, array in joined.items()}


def _apart(arrays: dict[str, torch.Tensor]) -> tuple[Entry, ...]:
    """The inverse of `_joined`."""
    if MISSED in arrays:
        return tuple(arrays[MISSED].split(1, 1)) if arrays[MISSED].shape[1] else ()
    names = [name.removeprefix(f"{MISSED}.") for name in arrays]
    of_rounds = zip(*(array.split(1, 1) for array in arrays.values()), strict=True)
    return tuple(Encoded(**dict(zip(names, parts, strict=True))) for parts in of_rounds)
