"""Sessions of secure sums in one process, with clients that answer as those on other machines do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedspan.core.privacy import Privacy
from fedspan.core.wire import Arrays
from fedspan.replies.fixed_point import FixedPoint, Numbers
from fedspan.replies.secure import client as secure_client
from fedspan.replies.secure.client import Member, Session
from fedspan.replies.secure.identity import Identity
from fedspan.replies.secure.server import SecureSum


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
            self.identities = identities(messages)
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


def identities(clients: Iterable[int]) -> dict[int, Identity]:
    """New identities of clients that know each other."""
    private = {client: Ed25519PrivateKey.generate() for client in clients}
    roster = {client: key.public_key() for client, key in private.items()}
    return {client: Identity(key, roster) for client, key in private.items()}


def bytes_of(arrays: Arrays) -> int:
    """Bytes of the arrays of a message."""
    return sum(array.numel() * array.element_size() for array in arrays.values())


def whole(vector: np.ndarray, fixed: FixedPoint) -> Numbers:
    """A vector in whole numbers."""
    arrays, _, _ = fixed.encode({"v": torch.from_numpy(vector)})
    return fixed.join(arrays, 0)[:-1]


def signed(total: Numbers) -> np.ndarray:
    """Whole numbers modulo 2^bits as those nearest to zero."""
    return total.view(f"i{total.itemsize}")


def real(total: Numbers, fixed: FixedPoint) -> list[float]:
    """A sum of encoded numbers as real ones."""
    return (signed(total) / fixed.scale).tolist()


def session(
    values: dict[int, np.ndarray], privacy: Privacy, gone: dict[str, Any] | None = None
) -> tuple[SecureSum, LocalClients]:
    """(the sum, its clients)"""
    fixed = FixedPoint.of(privacy)
    clients = LocalClients(
        privacy,
        lambda there: {i: whole(values[i], fixed) for i in there},
        lambda phase: (gone or {}).get(phase, ()),
    )
    length = len(next(iter(values.values())))
    return SecureSum(sorted(values), length, privacy, clients.ask), clients


def at(
    phase: str, privacy: Privacy | None = None, clients: int = 5
) -> tuple[dict[int, Any], dict[int, Any], Any]:
    """(sessions before a question, the messages with it, the clients), of an honest session."""
    privacy = privacy or Privacy(secure=True)
    one, local = session({i: np.ones(4) for i in range(clients)}, privacy)
    kept: list[Any] = []

    def ask(asked: str, messages: Any, looks: Any) -> Any:
        if asked == phase:
            kept.extend([dict(local.sessions), messages])
        return local.ask(asked, messages, looks)

    one.ask = ask
    one.run()
    return kept[0], kept[1], local
