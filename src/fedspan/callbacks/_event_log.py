"""Logs what goes wrong in a simulated run, such as a reply that is left out: the first event of each kind.

Every event is in the history. Across machines each one is logged (`remote.flower.server`).
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from fedspan.core.callback import Callback

if TYPE_CHECKING:
    from fedspan.engine.loop import Loop

log = logging.getLogger("fedspan")
NUMBERS = re.compile(r"[\d.,]+(?:e[+-]?\d+)?(?:[, ]+[\d.,]+(?:e[+-]?\d+)?)*")


def kind_of(event: str) -> str:
    """The event without its numbers: events that differ in these alone are of one kind."""
    return NUMBERS.sub("#", event)


class EventLog(Callback):
    """Logs the first event of each kind."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def on_round_end(self, run: Loop) -> None:
        for event in run.heard.told:
            kind = kind_of(event)
            if kind not in self.seen:
                self.seen.add(kind)
                log.warning("%s (others of this kind are in the history alone)", event)
