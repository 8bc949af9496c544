"""What carries messages between the server and its clients, and what can go wrong on the way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from fedspan.core.errors import ResumableError
from fedspan.remote.messages import RoundMessage


@dataclass(frozen=True)
class Failure:
    """Why there is no reply to a message."""

    reason: str
    sent: bool = True  # False: the message never left the server
    kind: str = "no reply"  # of the event


class Channel(Protocol):
    """Carries messages to clients and returns their replies."""

    def deliver(self, messages: list[RoundMessage]) -> Iterator[tuple[int, RoundMessage | Failure]]:
        """Yield (index of the message, its reply) as replies arrive; ends when the time is up or all have replied."""


class StalledError(ResumableError):
    """No round can be done: the clients are away, or refuse."""
