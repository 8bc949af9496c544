"""Logs what goes wrong in a simulated run, such as a reply that is left out: the first event of each kind.

Every event is in the history. Across machines each one is logged (`remote.flower.server`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

log = logging.getLogger("fedspan")
NUMBERS = re.compile(r"[\d.,]+(?:e[+-]?\d+)?(?:[, ]+[\d.,]+(?:e[+-]?\d+)?)*")


def kind_of(event: str) -> str:
    """The event without its numbers: events that differ in these alone are of one kind."""
    return NUMBERS.sub("#", event)


class EventLog:
    """Logs the first event of each kind."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def __call__(self, told: Sequence[str]) -> None:
        for event in told:
            kind = kind_of(event)
            if kind not in self.seen:
                self.seen.add(kind)
                log.warning("%s (others of this kind are in the history alone)", event)
