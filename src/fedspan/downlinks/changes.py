"""The moves that a client missed, r values for each round, or x in full if that is fewer bytes.

The server keeps a log of the moves, each as it was sent. A client keeps a copy of x and subtracts Pᵀ move for each
round since; both ends draw the P of any round from the shared seed.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from fedspan import Bundle, Downlink, LinearMap, Log, ModelSync, Parts, Round, Vector, register
from fedspan.core.sync import bytes_of


@register
@dataclass(frozen=True)
class Changes(Downlink):
    """r values for each missed round."""

    logs = True
    # bytes of a log from which entries are dropped that no client lacks
    large_log: ClassVar[int] = 1 << 24

    def init(self, x0: Vector) -> Parts:
        return {"log": Log()}

    def down(self, server: Bundle, rnd: Round) -> Parts:
        return {"sync": ModelSync.of(server.x, server.log, rnd)}

    def model(self, down: Bundle) -> Any:
        return down.sync.model

    def send(self, server: Bundle, move: Vector, P: LinearMap, rnd: Round) -> tuple[Vector, Parts]:
        return move, self.push(server.log, move, rnd)

    def rest(self, server: Bundle, P: LinearMap, rnd: Round) -> Parts:
        nothing = server.x.new_zeros(*server.x.shape[:-1], P.rank)
        return self.push(server.log, self.entry(nothing, rnd), rnd)

    def entry(self, move: Vector, rnd: Round) -> Any:
        """Return a move as it is logged and sent."""
        return move

    def push(self, log: Log, entry: Any, rnd: Round) -> Parts:
        """Return the log with this round's move, and as many before it as are cheaper than x."""
        size = bytes_of(entry)
        keep = max(1, rnd.layout.size * rnd.layout.dtype.itemsize // size)
        if size * len(log.entries) > self.large_log:
            keep = min(keep, rnd.missed_by_any)
        return {"log": log.push(entry, keep)}
