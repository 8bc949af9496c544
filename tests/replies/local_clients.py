"""The clients of a secure sum in one process, which answer as clients on other machines do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from fedspan.core.privacy import Privacy
from fedspan.core.wire import Arrays
from fedspan.replies.fixed_point import Numbers
from fedspan.replies.secure import client as secure_client
from fedspan.replies.secure.client import Member, Session
from fedspan.replies.secure.identity import Identity


@dataclass
class LocalClients:
    """Answers the questions of a `SecureSum`."""

    privacy: Privacy
    train: Callable[
        [list[int]], dict[int, Numbers]
    ]  # the vectors of clients, once it is known who sent shares
    gone: Callable[[str], Collection[int]] = lambda _: ()  # clients that do not answer a question
    examples: Mapping[int, int] | None = None  # by which each client counts; None: all alike
    sessions: dict[int, Session] = field(default_factory=dict)
    identities: dict[int, Identity] = field(default_factory=dict)  # of clients that sign their keys
    sent: Counter[int] = field(default_factory=Counter)  # bytes to each client
    received: Counter[int] = field(default_factory=Counter)  # bytes from each client

    def ask(self, phase: str, messages: dict[int, Arrays], _: Arrays) -> dict[int, Arrays]:
        """The answers of the clients that are still there."""
        if self.privacy.secure_signed and not self.identities:
            self.identities = Identity.group(messages)
        gone = set(self.gone(phase))
        there = [client for client in messages if client not in gone]
        numbers = self.train(there) if phase == "train" else {}
        answers = {}
        for client, message in messages.items():
            self.sent[client] += bytes_of(message)
            if client not in gone:
                answers[client] = self._answer(phase, client, message, numbers)
                self.received[client] += bytes_of(answers[client])
        return answers

    def _answer(
        self, phase: str, client: int, message: Arrays, numbers: dict[int, Numbers]
    ) -> Arrays:
        own = None if self.examples is None else self.examples[client]
        member = Member(client, self.privacy, self.identities.get(client), own)
        if phase == "keys":
            new, answer = secure_client.advertise(message, member)
        elif phase == "shares":
            new, answer = secure_client.share(self.sessions[client], message, member)
        elif phase == "train":
            new, answer = secure_client.mask(self.sessions[client], message, numbers.pop(client))
        else:
            new, answer = secure_client.unmask(self.sessions[client], message)
        self.sessions[client] = new
        return answer


def bytes_of(arrays: Arrays) -> int:
    """Bytes of the arrays of a message."""
    return sum(array.numel() * array.element_size() for array in arrays.values())
