"""How a client gets x when only r numbers a round travel.

A client keeps its copy of x and the round it dates from. The server keeps a `Log` of the last rounds' changes of x as
they travel: r numbers in a round's own subspace, or the code of a compressed change. It sends what the client missed,
or the whole x when that is fewer bytes or the client is new. `Catchup` is that download for a whole cohort. In one
process `x` is simply there; across a wire `pick` cuts out what one client is sent and `open` rebuilds x at the other
end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from fedspan.core.encoded import Encoded
from fedspan.core.errors import ProtocolError
from fedspan.core.layout import Vector

Entry = Vector | Encoded  # all entries of a log are of one kind and length
Keep = Literal["none", "first", "all"]


@dataclass(frozen=True, eq=False)
class Log:
    """Changes of x in rounds `end - len(entries)` … `end - 1`, each as it travels."""

    entries: tuple[Entry, ...] = ()
    end: int = 0

    def push(self, entry: Entry, keep: int) -> Log:
        """The log with one more round, holding at most the last `keep`."""
        return Log((*self.entries, entry)[-keep:], self.end + 1)

    def at(self, t: int) -> Any:
        """The change made in round t."""
        index = t - self.end + len(self.entries)
        if not 0 <= index < len(self.entries):
            raise ProtocolError(f"the change of round {t} is not in the log, which ends before round {self.end}")
        return self.entries[index]


@dataclass(frozen=True, eq=False)
class ModelSync:
    """What each client of a cohort lacks of x.

    `keep` says which log entries a client is sent even when x comes whole: none, the one of the round it last took
    part in ("first"), or all it missed.
    """

    x: Vector | None  # as the server has it; after a wire only where it came whole
    log: Log
    last_round: npt.NDArray[np.int64]  # (runs, clients): round each copy dates from, -1 for none
    keep: Keep = "none"

    @functools.cached_property
    def whole(self) -> npt.NDArray[np.bool_]:
        """Who gets x itself: whoever is new, and whoever it costs fewer bytes than what was missed."""
        new = self.last_round < 0
        if not self.log.entries or self.keep == "all":
            return new
        worth = bytes_of(self.model) // bytes_of(self.log.entries[-1]) + (1 if self.keep == "first" else 0)
        return new | (self.last_round < self.log.end - min(worth, len(self.log.entries)))

    @property
    def model(self) -> Vector:
        """x as the cohort has it once it has caught up."""
        if self.x is None:
            raise ProtocolError("this download holds changes only; `open` it with the client's copy of the model first")
        return self.x

    @functools.cached_property
    def entries_sent(self) -> npt.NDArray[np.int64]:
        """How many log entries travel to each client."""
        gap = self.log.end - np.maximum(self.last_round, 0)
        if self.keep == "all":
            return gap
        beside = np.where(self.last_round < 0, 0, 1) if self.keep == "first" else 0
        return np.where(self.whole, beside, gap)

    def sizes(self) -> npt.NDArray[np.int64]:
        """Bytes sent to each client, (runs, clients)."""
        entry = bytes_of(self.log.entries[-1]) if self.log.entries else 0
        if self.keep == "none":
            return np.where(self.whole, bytes_of(self.model), (self.log.end - self.last_round) * entry)
        return self.whole * bytes_of(self.model) + self.entries_sent * entry

    def pick(self, client: int, whole: bool = False) -> ModelSync:
        """The download of one client of a single run, holding only what is sent to it; `whole` sends x in any case."""
        start, sent = max(int(self.last_round[0, client]), 0), int(self.entries_sent[0, client])
        if whole and self.keep != "all":
            sent = int(self.keep == "first" and self.last_round[0, client] >= 0)
        entries = tuple(self.log.at(t) for t in range(start, start + sent))
        x = self.x if whole or self.whole[0, client] else None
        return ModelSync(x, Log(entries, start + sent), self.last_round[:, client : client + 1], self.keep)

    def arrays(self) -> dict[str, Vector]:
        """What travels to one client: x, or the missed entries in order, or both."""
        missed = _joined(self.log.entries)
        return missed if self.x is None else {"x": self.x, **missed}

    @staticmethod
    def from_arrays(arrays: dict[str, Vector]) -> ModelSync:
        """The other end of `arrays`. The client alone knows what its copy dates from: `open` fills that in."""
        entries = _apart({name: array for name, array in arrays.items() if name != "x"})
        return ModelSync(arrays.get("x"), Log(entries, len(entries)), np.array([[-1]]))

    def open(self, copy: Vector | None, last_round: int, expand: Callable[[Any, int], Vector]) -> ModelSync:
        """At a client with a copy of x from round `since`: rebuild x; `expand(entry, t)` lifts a round's change."""
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
                x = x + expand(log.at(t), t)
        return replace(self, x=x, log=log, last_round=np.array([[last_round]]))


@runtime_checkable
class HasSync(Protocol):
    """A server's message that brings x as a `ModelSync`."""

    @property
    def sync(self) -> ModelSync: ...


def with_sync(message: Any, change: Callable[[ModelSync], ModelSync]) -> Any:
    """The message with its `ModelSync` changed; a message without one stays as it is."""
    sync = message.sync if isinstance(message, HasSync) else None
    return message if sync is None else replace(message, sync=change(sync))


def bytes_of(entry: Entry) -> int:
    """Bytes in which it travels."""
    return entry.bytes if isinstance(entry, Encoded) else entry.shape[-1] * entry.element_size()


MISSED = "missed"


def _joined(entries: tuple[Entry, ...]) -> dict[str, torch.Tensor]:
    """Entries one after the other along the clients' axis; of codes each part by itself."""
    named = [entry.parts if isinstance(entry, Encoded) else {"": entry} for entry in entries]
    joined = {name: torch.cat([parts[name] for parts in named], 1) for name in (named[0] if named else ())}
    return {f"{MISSED}.{name}" if name else MISSED: array for name, array in joined.items()}


def _apart(arrays: dict[str, torch.Tensor]) -> tuple[Entry, ...]:
    """The other end of `_joined`."""
    if MISSED in arrays:
        return tuple(arrays[MISSED].split(1, 1))
    names = [name.removeprefix(f"{MISSED}.") for name in arrays]
    of_rounds = zip(*(array.split(1, 1) for array in arrays.values()), strict=True)
    return tuple(Encoded(**dict(zip(names, parts, strict=True))) for parts in of_rounds)
