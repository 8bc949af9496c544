"""What carries the messages of a round between the server and its clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fedspan.core import wire
from fedspan.core.layout import Vector
from fedspan.core.round import Round


@dataclass(frozen=True, eq=False)
class Replies:
    """What came of a round's exchange: which places of the cohort replied, and what."""

    places: npt.NDArray[np.int64]
    up: Any  # the cohort's message of those places; anything where there are none
    buffers: Vector | None = None
    sent: npt.NDArray[np.int64] | None = None  # (runs, S): bytes, if not the download's
    received: npt.NDArray[np.int64] | None = None  # (runs, places): the same of the replies
    events: tuple[str, ...] = ()  # what went wrong, in words


class Transport(Protocol):
    """The only thing in which runtimes differ."""

    def exchange(self, rnd: Round, down: Any, buffers: Vector | None) -> Replies:
        """Delivers a round's download and the model's buffers to the cohort."""

    def save(self) -> wire.Arrays:
        """What this end must keep of the clients for a later `load`."""

    def saved(self) -> None:
        """What `save` gave is on disk."""

    def load(self, arrays: wire.Arrays) -> None:
        """Puts back what `save` gave."""
