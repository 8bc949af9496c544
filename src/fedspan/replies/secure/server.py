"""The server's part of a secure sum: it relays keys and sealed shares, adds up masked replies and removes the masks.

Whatever carries the questions is given as a function: the simulator's clients, or messages to other machines. A client
that does not answer a question, or answers with something else, is not asked again. Its masks are removed with the
shares of the others, while at least t clients are left.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from fedspan.core.errors import ProtocolError
from fedspan.core.privacy import Privacy
from fedspan.core.wire import Arrays
from fedspan.replies.fixed_point import FixedPoint, Numbers, shares_of
from fedspan.replies.secure.client import (
    NAMED,
    SEALED,
    count_in,
    roster_hash,
    to_bytes,
    to_tensor,
    width,
)
from fedspan.replies.secure.keys import (
    KEY,
    SESSION,
    add_mask,
    agreed_key,
    commitment,
    new_key,
    public_key,
)
from fedspan.replies.secure.shares import SHARE, recover

Ask = Callable[[str, dict[int, Arrays], Arrays], dict[int, Arrays]]
"""(question, message to each client, an answer as it must look) → the answers that arrived."""


class TooFewError(ProtocolError):
    """Fewer clients than the threshold are left, or they cannot remove the masks: the round changes nothing."""


def check_enough(phase: str, count: int, clients: int, threshold: int) -> None:
    """Raises where fewer clients than the threshold have answered a question."""
    if count < threshold:
        raise TooFewError(
            f"{count} of {clients} clients answered {phase!r}, fewer than the threshold of {threshold}"
        )


def bytes_of_round(clients: int, length: int, privacy: Privacy) -> tuple[int, int]:
    """(bytes to, bytes from) each of the clients of a round of which none drops out; none: the first question alone."""
    if not clients:
        return SESSION, width(privacy)
    number = 8  # of a client, or of the threshold
    to = SESSION
    to += SESSION + clients * (number + width(privacy)) + number
    to += SESSION + clients * (number + SEALED)
    to += SESSION + clients * number
    return to, width(
        privacy
    ) + clients * SEALED + length * privacy.secure_bits // 8 + clients * SHARE


@dataclass
class SecureSum:
    """One session: the sum of one vector of whole numbers per client."""

    clients: list[int]
    length: int  # whole numbers per client
    privacy: Privacy
    ask: Ask
    used: set[bytes] = field(
        default_factory=set
    )  # public keys of earlier sessions, which nobody may use again
    weights: Mapping[int, float] | None = None  # client → share of the examples at the server
    about: str = "0 "  # the round and the settings, of which every client must be told the same
    events: list[tuple[int, str]] = field(default_factory=list)  # (client, what it did)

    def __post_init__(self) -> None:
        self.fixed = FixedPoint.of(self.privacy)
        self.fixed.check(len(self.clients))
        self.threshold = self.privacy.survivors(len(self.clients))
        self.id = secrets.token_bytes(SESSION)
        self.asked = ""  # the last question
        self.factors: dict[int, float] = {}  # how much each client that sent keys counts

    def run(self) -> tuple[list[int], Numbers]:
        """(the clients whose vectors are in the sum, the sum modulo 2^bits).

        Raises:
            TooFewError: Nothing can be counted.
        """
        keys = self._keys()
        order = sorted(keys)
        self.factors = shares_of({client: count_in(keys[client]) for client in order})
        roster = {
            "clients": torch.tensor(order),
            "keys": torch.stack([keys[client] for client in order]),
        }
        roster["threshold"] = torch.tensor([self.threshold])
        self.roster = to_bytes(
            roster_hash(self.id, self.about, self.threshold, order, roster["keys"])
        )
        sealed = self._question(
            "shares", dict.fromkeys(order, roster), shares=(torch.uint8, (len(order), SEALED))
        )
        sharers = sorted(sealed)
        relayed: dict[int, Arrays] = {}
        for one in sharers:
            to_one = torch.stack([sealed[other]["shares"][order.index(one)] for other in sharers])
            relayed[one] = {"sharers": torch.tensor(sharers), "shares": to_one}
        kind = torch.int32 if self.fixed.bits == 32 else torch.int64
        masked = self._question("train", relayed, masked=(kind, (self.length,)))
        survivors = sorted(masked)
        total = np.zeros(self.length, self.fixed.dtype)
        for one in survivors:
            total += masked.pop(one)["masked"].numpy().view(self.fixed.dtype)
        asked = {one: {"survivors": torch.tensor(survivors)} for one in survivors}
        answers = self._question("unmask", asked, shares=(torch.uint8, (len(sharers), SHARE)))
        self._remove_masks(
            total,
            keys,
            sharers,
            survivors,
            {one: found["shares"] for one, found in answers.items()},
        )
        return survivors, total

    def _question(
        self, phase: str, messages: dict[int, Arrays], **looks: tuple[torch.dtype, tuple[int, ...]]
    ) -> dict[int, Arrays]:
        """The well-formed answers to a question; at least as many as the threshold."""
        self.asked = phase
        session = {f"{NAMED}session": to_tensor(self.id)}
        whole = {
            client: session | {f"{NAMED}{name}": array for name, array in message.items()}
            for client, message in messages.items()
        }
        expected = {
            name: torch.empty(shape, dtype=kind, device="meta")
            for name, (kind, shape) in looks.items()
        }
        answers = {}
        for client, answer in self.ask(phase, whole, expected).items():
            if _looks(answer) == _looks(expected):
                answers[client] = answer
            else:
                self.events.append((client, f"the answer to {phase!r} is not what was asked for"))
        check_enough(phase, len(answers), len(self.clients), self.threshold)
        return answers

    def _keys(self) -> dict[int, torch.Tensor]:
        """The public keys of each client, and its commitment."""
        found: dict[int, torch.Tensor] = {}
        probe = new_key()
        answers = self._question(
            "keys", {one: {} for one in self.clients}, keys=(torch.uint8, (width(self.privacy),))
        )
        for client, answer in answers.items():
            keys = to_bytes(answer["keys"])
            own = {keys[:KEY], keys[KEY : 2 * KEY]}
            try:
                for key in own:
                    agreed_key(probe, key, "", self.id)
                if len(own) < 2 or own & self.used:
                    raise ProtocolError("its keys were used before")
            except ProtocolError as error:
                self.events.append((client, str(error)))
                continue
            self.used |= own
            found[client] = answer["keys"]
        for client, count in self._wrong_counts(found).items():
            self.events.append(
                (client, f"it would count by {count} examples, which is not what the server knows")
            )
            del found[client]
        check_enough("keys", len(found), len(self.clients), self.threshold)
        return found

    def _wrong_counts(self, keys: dict[int, torch.Tensor]) -> dict[int, int]:
        """Client → the number of examples that it announced, where that is not in proportion to its weight."""
        counts = {client: count_in(row) for client, row in keys.items()}
        known = {client: 1.0 if self.weights is None else self.weights[client] for client in keys}
        per_weight = float(
            np.median([count / known[client] for client, count in counts.items()] or [1.0])
        )
        return {
            client: n
            for client, n in counts.items()
            if not 0.999 < n / (known[client] * per_weight + 1e-300) < 1.001
        }

    def _remove_masks(
        self,
        total: Numbers,
        keys: dict[int, torch.Tensor],
        sharers: list[int],
        survivors: list[int],
        answers: dict[int, torch.Tensor],
    ) -> None:
        """Takes the self masks of the survivors and the pairwise masks of the others out of the sum."""
        wrong: Counter[int] = Counter()
        for row, client in enumerate(sharers):
            shares = {one + 1: to_bytes(answer[row]) for one, answer in answers.items()}
            alive = client in survivors
            try:
                secret, points = recover(
                    shares, self.threshold, self._fits(client, alive, to_bytes(keys[client]))
                )
            except ProtocolError as error:
                raise TooFewError(
                    f"the mask of client {client} cannot be removed: {error}"
                ) from None
            wrong.update(point - 1 for point in points)
            if alive:
                add_mask(total, secret, -1)
                continue
            for other in survivors:
                pair = (min(client, other), max(client, other))
                seed = agreed_key(
                    secret, to_bytes(keys[other][KEY : 2 * KEY]), "mask", self.roster, *pair
                )
                add_mask(total, seed, -1 if other < client else 1)
        self.events += [
            (one, f"{count} of the shares that it sent were wrong") for one, count in wrong.items()
        ]

    def _fits(self, client: int, alive: bool, keys: bytes) -> Callable[[bytes], bool]:
        """Whether a secret is what a client has announced: its seed, or else its private key."""
        if alive:
            return lambda seed: commitment(seed, self.id, client) == keys[2 * KEY : 3 * KEY]
        return lambda private: public_key(private) == keys[KEY : 2 * KEY]


def _looks(arrays: Arrays) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {name: (array.dtype, tuple(array.shape)) for name, array in arrays.items()}
