"""The server's part of a secure sum: it relays keys and sealed shares, adds up masked replies and removes the masks.

Whatever carries the questions is given as a function: the simulator's clients, or messages to other machines. A client
that does not answer a question, or answers with something else, is not asked again. Its masks are removed with the
shares of the others, while at least t clients are left.
"""

from __future__ import annotations

import functools
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from fedspan.core.errors import CheckpointError, ProtocolError
from fedspan.core.privacy import Privacy
from fedspan.core.wire import Arrays, check_forms
from fedspan.replies.fixed_point import FixedPoint, Numbers
from fedspan.replies.secure.client import (
    NAMED,
    SEALED,
    count_in,
    factors_of,
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


def form(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """An array of an answer as it must look."""
    return torch.empty(shape, dtype=dtype, device="meta")


def check_enough(phase: str, count: int, clients: int, threshold: int) -> None:
    """Raises where fewer clients than the threshold have answered a question."""
    if count < threshold:
        raise ProtocolError(
            f"{count} of {clients} clients answered {phase!r}, fewer than the threshold of {threshold}"
        )


def bytes_of_round(clients: int, length: int, privacy: Privacy) -> tuple[int, int]:
    """(bytes to, bytes from) each of the clients of a round of which none drops out; none: the first question alone."""
    own = width(privacy)
    if not clients:
        return SESSION, own
    number = 8  # of a client, or of the threshold
    down = 4 * SESSION + clients * (3 * number + own + SEALED) + number
    return down, own + clients * (SEALED + SHARE) + length * privacy.secure_bits // 8


@dataclass
class SecureSum:
    """One session: the sum of one vector of whole numbers per client."""

    clients: list[int]
    length: int  # whole numbers per client
    privacy: Privacy
    ask: Ask
    used: set[bytes] = field(default_factory=set)  # public keys of earlier sessions
    weights: Mapping[int, float] | None = None  # client → share of the examples at the server
    about: str = "0 "  # the round and the settings, of which every client must be told the same

    def __post_init__(self) -> None:
        self.fixed = FixedPoint.of(self.privacy)
        self.fixed.check(len(self.clients))
        self.threshold = self.privacy.survivors(len(self.clients))
        self.id = secrets.token_bytes(SESSION)
        self.asked = ""  # the last question
        self.events = list[tuple[int, str]]()  # (client, what it did)
        self.factors = dict[int, float]()  # how much each client that sent keys counts

    def run(self) -> tuple[list[int], Numbers]:
        """(the clients whose vectors are in the sum, the sum modulo 2^bits).

        Raises:
            ProtocolError: Fewer clients than the threshold are left, or they cannot remove the masks.
        """
        # 1  keys
        none = dict.fromkeys(self.clients, Arrays())
        answers = self._question("keys", none, keys=form(width(self.privacy)))
        keys = self._usable({client: answer["keys"] for client, answer in answers.items()})
        clients, rows = list(keys), torch.stack([*keys.values()])
        self.factors = dict(zip(clients, factors_of(rows).tolist(), strict=True))
        roster = roster_hash(self.id, self.about, self.threshold, clients, rows)

        # 2  shares
        told = {"clients": torch.tensor(clients), "keys": rows}
        told["threshold"] = torch.tensor([self.threshold])
        asked = dict.fromkeys(clients, told)
        sealed = self._question("shares", asked, shares=form(len(clients), SEALED))
        sharers = sorted(sealed)
        everyone = torch.stack([sealed[other]["shares"] for other in sharers], 1)
        relayed = {
            one: {"sharers": torch.tensor(sharers), "shares": shares}
            for one, shares in zip(clients, everyone, strict=True)
            if one in sealed
        }

        # 3  the masked replies
        kind = torch.int32 if self.fixed.bits == 32 else torch.int64
        masked = self._question("train", relayed, masked=form(self.length, dtype=kind))
        survivors, total = sorted(masked), np.zeros(self.length, self.fixed.dtype)
        for one in survivors:
            total += masked.pop(one)["masked"].numpy().view(self.fixed.dtype)

        # 4  the self masks of the survivors, and the pairwise masks of the others, go
        named = {one: {"survivors": torch.tensor(survivors)} for one in survivors}
        opened = self._question("unmask", named, shares=form(len(sharers), SHARE))
        wrong = Counter[int]()
        for row, client in enumerate(sharers):
            shares = {one + 1: to_bytes(opened[one]["shares"][row]) for one in opened}
            own, alive = to_bytes(keys[client]), client in survivors
            # what the client has announced of its seed, or else of its private key
            public, known = public_key, own[KEY : 2 * KEY]
            if alive:
                public = functools.partial(commitment, session=self.id, client=client)
                known = own[2 * KEY : 3 * KEY]
            try:
                secret, points = recover(shares, self.threshold, public, known)
            except ProtocolError as error:
                raise ProtocolError(
                    f"the mask of client {client} cannot be removed: {error}"
                ) from None
            wrong.update(points)
            if alive:
                add_mask(total, secret, -1)
            for other in () if alive else survivors:
                pair = (min(client, other), max(client, other))
                theirs = to_bytes(keys[other][KEY : 2 * KEY])
                seed = agreed_key(secret, theirs, "mask", to_bytes(roster), *pair)
                add_mask(total, seed, -1 if other < client else 1)
        self.events += [
            (point - 1, f"{count} of the shares that it sent were wrong")
            for point, count in wrong.items()
        ]
        return survivors, total

    def _question(
        self, phase: str, messages: dict[int, Arrays], **looks: torch.Tensor
    ) -> dict[int, Arrays]:
        """The well-formed answers to a question; at least as many as the threshold."""
        self.asked, session = phase, {"session": to_tensor(self.id)}
        whole = {
            client: {f"{NAMED}{name}": array for name, array in (session | message).items()}
            for client, message in messages.items()
        }
        answers = {}
        for client, answer in self.ask(phase, whole, looks).items():
            try:
                check_forms(answer, looks, exact=True)
                answers[client] = answer
            except CheckpointError:
                self.events.append((client, f"the answer to {phase!r} is not what was asked for"))
        check_enough(phase, len(answers), len(self.clients), self.threshold)
        return answers

    def _usable(self, rows: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """What clients have announced, of those whose keys and numbers of examples can be used."""
        found, probe = dict[int, torch.Tensor](), new_key()
        for client in sorted(rows):
            keys = to_bytes(rows[client])
            own = {keys[:KEY], keys[KEY : 2 * KEY]}
            try:
                for key in own:
                    agreed_key(probe, key, "", self.id)
                if len(own) < 2 or own & self.used:
                    raise ProtocolError("its keys were used before")
                self.used |= own
                found[client] = rows[client]
            except ProtocolError as error:
                self.events.append((client, str(error)))
        # the numbers of examples must be in proportion to the weights that the server knows
        ratios = {
            client: count_in(row) / (1.0 if self.weights is None else self.weights[client])
            for client, row in found.items()
        }
        usual = float(np.median([*ratios.values()])) if ratios else 1.0
        for client, ratio in ratios.items():
            if not 0.999 < ratio / (usual + 1e-300) < 1.001:
                examples = count_in(found.pop(client))
                why = f"it would count by {examples} examples, which is not what the server knows"
                self.events.append((client, why))
        check_enough("keys", len(found), len(self.clients), self.threshold)
        return found
