"""The moves that a client missed, r values for each round, or x in full if that is fewer bytes.

The server keeps a log of the moves, each as it was sent. A client keeps a copy of x and subtracts Pᵀ move for each
round since; both ends draw the P of any round from the shared seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedspan import Downlink, Log, ModelSync, Round, Vector, register
from fedspan.core.axes import Parts
from fedspan.core.bundle import Bundle
from fedspan.core.linear_map import LinearMap
from fedspan.core.sync import bytes_of

LARGE_LOG = 1 << 24  # bytes of a log from which entries are dropped that no client lacks


@register
@dataclass(frozen=True)
class Changes(Downlink):
    """r values for each missed round."""

    def init(self, x0: Vector) -> Parts:
        return {"log": Log()}

    def down(self, server: Bundle, rnd: Round) -> Parts:
        return {"sync": ModelSync.of(server.x, server.log, rnd)}

    def model(self, down: Bundle) -> Vector:
        x: Vector = down.sync.model
        return x

    def send(self, server: Bundle, move: Vector, P: LinearMap, rnd: Round) -> tuple[Vector, Parts]:
        return move, {"log": self.push(server.log, move, rnd)}

    def rest(self, server: Bundle, P: LinearMap, rnd: Round) -> Parts:
        nothing = server.x.new_zeros(*server.x.shape[:-1], P.rank)
        return {"log": self.push(server.log, nothing, rnd)}

    def push(self, log: Log, entry: Any, rnd: Round) -> Log:
        """Add this round's move, and keep as many before it as are cheaper than x."""
        size = bytes_of(entry)
        keep = max(1, rnd.layout.size * rnd.layout.dtype.itemsize // size)
        if size * len(log.entries) > LARGE_LOG:
            keep = min(keep, rnd.missed_by_any)
        return log.push(entry, keep)
