"""A virtual clock: the hours of a run over the clients' own links and devices (`core.federation`).

A client that takes part in a round needs latency + 8 down / down_mbit + K step_seconds + 8 up / up_mbit, with the
packed bytes of its download and its reply. A round lasts as long as its slowest client that counts. Only clients that
are there when a round begins can be drawn; while nobody is there, the server waits. Evaluation takes no time.

All draws are from the run's seed, so a run has the same hours wherever it is computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedspan.core import seeds as streams
from fedspan.core.digest import digest
from fedspan.core.errors import CheckpointError, DataError, SpecError
from fedspan.core.federation import DEVICES, Federation
from fedspan.data import columns
from fedspan.replies.chain import Event

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
PAUSE = 1 / 60  # hours after which a server looks again for clients
MOST_PAUSES = 100_000


class Clock:
    """The hours of one run.

    Args:
        federation: The settings.
        clients: The number of clients.
        seed: The seed of the run.
        steps: Local steps of a client in a round.
        names: The clients' names, by which a file may name them.
    """

    def __init__(
        self,
        federation: Federation,
        clients: int,
        seed: int,
        steps: int,
        names: Sequence[str] | None = None,
    ) -> None:
        self.clients, self.seed, self.steps, self.hours = clients, seed, steps, 0.0
        self.names = names or range(clients)
        self.up, self.down, self.latency, self.step = (
            self._values(name, federation.value(name)) for name in DEVICES
        )
        self.available = federation.value("available")
        self.always = self.available in ("always", 1.0)  # whether everyone is there in every round
        self.trace: tuple[Ids, Floats, Floats] | None = None  # who is there from when to when
        if isinstance(self.available, Mapping):
            self.start = self.available.get("start", 24 * self._uniform("available"))
        elif isinstance(self.available, str) and not self.always:
            table = _read("available", self.available, "from", "to", "client")
            start, end = (table[one].astype(np.float64) for one in ("from", "to"))
            if not (np.isfinite(end) & (start >= 0) & (start < end)).all():
                raise SpecError(
                    f"`federation.available`: {self.available!r} has a row whose `to` is not after its `from`"
                )
            self.trace = self._ids("available", table["client"]), start, end

    # --- The clients' links and devices ---

    def _uniform(self, purpose: str, *path: int) -> Floats:
        keys = streams.keys((self.seed,), f"federation {purpose}", *path)
        drawn: Floats = streams.uniform(keys, self.clients)[0]
        return drawn

    def _values(self, name: str, given: Any) -> Floats:
        """Return the value of each client."""
        if isinstance(given, Mapping):
            low, high = math.log(given["low"]), math.log(given["high"])
            return np.exp(low + (high - low) * self._uniform(name))
        if not isinstance(given, str):
            return np.full(self.clients, float(given))
        table = _read(name, given, name)
        values, own = table[name].astype(np.float64), table.get("client")
        order = np.arange(len(values)) if own is None else self._ids(name, own)
        if sorted(order.tolist()) != list(range(self.clients)):
            raise SpecError(
                f"`federation.{name}`: {given!r} has {len(values)} rows for {self.clients} clients; give one for each"
            )
        zero = name in ("latency", "step_seconds")  # whether it may be 0
        if not (np.isfinite(values) & ((values >= 0) if zero else (values > 0))).all():
            raise SpecError(
                f"`federation.{name}`: {given!r} has values that are not positive numbers in column {name!r}"
            )
        return values[np.argsort(order)]

    def _ids(self, name: str, column: npt.NDArray[Any]) -> Ids:
        """Return the numbers of the clients that a file names."""
        known = {str(one): number for number, one in enumerate(self.names)}
        asked = [str(one) for one in column]
        if unknown := [one for one in asked if one not in known]:
            raise SpecError(f"`federation.{name}` names a client that there is not: {unknown[0]!r}")
        return np.array([known[one] for one in asked], np.int64)

    # --- Who is there ---

    def _there(self, t: int, pauses: int) -> Any:
        if self.trace is not None:
            ids, start, end = self.trace
            now = self.hours % end.max()
            return np.isin(np.arange(self.clients), ids[(start <= now) & (now < end)])
        if isinstance(self.available, Mapping):
            there = (self.hours - self.start) % 24 < self.available["hours"]
            return np.broadcast_to(there, self.clients)
        return self._uniform("available", t, pauses) < self.available

    def present(self, t: int) -> npt.NDArray[np.bool_]:
        """Return who is there when round t begins; the clock moves on while nobody is."""
        for pauses in range(MOST_PAUSES):
            there: npt.NDArray[np.bool_] = self._there(t, pauses)
            if there.any():
                return there
            self.hours += PAUSE
        raise SpecError(
            f"`federation.available` leaves no client for {MOST_PAUSES * PAUSE / 24:.0f} days; let more of them be "
            "there"
        )

    def cohort(self, drawn: Ids, t: int) -> tuple[Ids, list[Event]]:
        """Return who takes part in round t, and who was absent; others take the places of the absent.

        Args:
            drawn: The clients that are drawn if everyone is there.
            t: The round.
        """
        if self.always:
            return drawn, []
        there = self.present(t)
        kept, absent = drawn[there[drawn]], drawn[~there[drawn]]
        others = np.setdiff1d(np.flatnonzero(there), kept)
        if size := min(len(absent), len(others)):
            keys = streams.keys((self.seed,), "federation replacement", t)
            kept = np.union1d(kept, others[streams.choose(keys, len(others), size)[0]])
        return kept, [Event("absent", client, "was not there") for client in absent.tolist()]

    # --- How long a round takes ---

    def advance(self, ids: Ids, up: Any, down: Any) -> list[Event]:
        """Add a round of these clients, which lasts as long as its slowest one needs.

        Args:
            ids: Clients that count, or all that were asked if none does.
            up: Bytes of their replies, one number or an array.
            down: Bytes of their downloads.

        Returns:
            Which client the round waited for.
        """
        if not len(ids):
            return []
        transfer = 8e-6 * (down / self.down[ids] + up / self.up[ids])
        each = (self.latency[ids] + self.steps * self.step[ids] + transfer).ravel()
        slowest = int(each.argmax())
        self.hours += float(each[slowest]) / 3600
        waited = f"the round waited {each[slowest]:.3g} s for it"
        return [Event("slow", int(ids[slowest]), waited)] if len(ids) > 1 else []

    # --- Checkpoints ---

    def save(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        own = [self.up, self.down, self.latency, self.step, *(self.trace or ())]
        return {"hours": self.hours, "links": digest(*(one.tobytes() for one in own))}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Restore what `save` returned."""
        if saved.get("links") != self.save()["links"]:
            raise CheckpointError(
                "a file of `federation` has changed since the checkpoint was written; restore it, or start the run "
                "again"
            )
        self.hours = float(saved["hours"])


def _read(name: str, path: str, *needed: str) -> columns.Columns:
    """Return the columns of a file, of which some must be there; all but `client` are of numbers."""
    try:
        table = columns.read(Path(path))
    except DataError as error:
        raise DataError(str(error).replace("`task.data`", f"`federation.{name}`", 1)) from None
    for one in needed:
        if one not in table:
            raise SpecError(f"`federation.{name}`: {path!r} has no column {one!r}")
        if one != "client" and table[one].dtype.kind not in "if":
            raise SpecError(f"`federation.{name}`: column {one!r} of {path!r} is not of numbers")
    return table
