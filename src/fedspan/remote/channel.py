"""What carries messages between the server and its clients, and what can go wrong on the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from fedspan.core.errors import ResumableError, one_line
from fedspan.remote.messages import RoundMessage

NAMED = 5  # clients with the same event


@dataclass(frozen=True)
class Failure:
    """Why there is no reply to a message."""

    reason: str
    sent: bool = True  # False: the message never left the server


class Channel(Protocol):
    """Carries messages to clients and returns their replies."""

    def deliver(self, messages: list[RoundMessage]) -> Iterator[tuple[int, RoundMessage | Failure]]:
        """Yield (index of the message, its reply) as replies arrive; ends when the time is up or all have replied."""


@dataclass(frozen=True)
class Event:
    """Something that went wrong with a client."""

    client: int
    what: str

    def __str__(self) -> str:
        return f"client {self.client}: {one_line(self.what)}"


def in_words(t: int, events: Sequence[Event]) -> list[str]:
    """The events of round t; where the same happens to many clients, it is one event with the first of them."""
    clients: dict[str, list[int]] = {}
    for event in events:
        clients.setdefault(event.what, []).append(event.client)
    told = []
    for event in events:
        same = clients[event.what]
        if len(same) <= NAMED:
            told.append(f"round {t}: {event}")
        elif event.client == same[0]:
            named = ", ".join(map(str, same[:NAMED]))
            told.append(
                f"round {t}: clients {named} and {len(same) - NAMED} more: {one_line(event.what)}"
            )
    return told


class StalledError(ResumableError):
    """No round can be done: the clients are away, or refuse."""
