"""Logs what goes wrong in a simulated run, such as a reply that is left out: the first event of each kind.

Every event is in the history. Across machines each one is logged (`remote.flower.server`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from fedspan.core.terminal import log

NUMBERS = re.compile(r"[\d.,]+(?:e[+-]?\d+)?(?:[, ]+[\d.,]+(?:e[+-]?\d+)?)*")


def kind_of(event: str) -> str:
    """Return the event without its numbers: events that differ in these alone are of one kind."""
    return NUMBERS.sub("#", event)


def event_log() -> Callable[[Sequence[str]], None]:
    """Return a function that logs the first event of each kind."""
    seen: set[str] = set()

    def logged(events: Sequence[str]) -> None:
        for event in events:
            if kind_of(event) not in seen:
                seen.add(kind_of(event))
                log.warning("%s (others of this kind are in the history alone)", event)

    return logged
