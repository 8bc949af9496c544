"""The messages between server and clients, what carries them, and what can go wrong on the way.

A message has a small header of plain values, and named flat arrays. The header carries the protocol, the version of
fedspan and a fingerprint of what both ends must agree on. Ends that do not compute the same thing therefore stop with
one clear error.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import fedspan
from fedspan.core import wire
from fedspan.core.digest import digest, digest_of_arrays
from fedspan.core.errors import ProtocolError, one_of
from fedspan.core.layout import Layout, all_finite

PROTOCOL = 4
DESCRIBE, SUMS, EVALUATE = "describe", "sums", "evaluate"  # questions about a client's own data
BEFORE = -1  # the round of what is asked before round 0
OPEN, SECURE = ("train", EVALUATE), ("train", "keys", "shares", "unmask")  # questions of a run
STATUSES = {*OPEN, *SECURE, DESCRIBE, SUMS, "ok", "lost", "refused", "failed"}
HEADER: dict[str, type] = {
    "protocol": int, "version": str, "fingerprint": str, "status": str, "t": int, "client": int, "accepted": int,
    "mark": int, "reason": str, "settings": str,
}  # fmt: skip
KNOWN_START = "participation.known_start"  # in an agreement a hash of the initial model


@dataclass(frozen=True, eq=False)
class RoundMessage:
    """One message of a round, in either direction."""

    status: str  # one of STATUSES: a question, or how the client's work on it went
    t: int  # round
    client: int  # 0 to N - 1
    accepted: int  # updates of this client that the server accepted before this round
    fingerprint: str
    arrays: wire.Arrays = field(default_factory=dict)
    reason: str = ""  # why a client refuses or fails
    settings: str = ""  # the settings of a client that refuses because they differ, as JSON
    mark: int = 0  # `mark_of` the last of these updates; 0: none yet
    max_reply: int = 1 << 62  # bytes that the reply may have; not sent
    protocol: int = PROTOCOL
    version: str = fedspan.__version__

    def header(self) -> dict[str, Any]:
        """All fields but the arrays."""
        return {name: value for name, value in vars(self).items() if name in HEADER}

    @staticmethod
    def read(header: dict[str, Any], arrays: wire.Arrays) -> RoundMessage:
        """A message from what came over the network; every value is checked."""
        for name, kind in HEADER.items():
            if type(header.get(name)) is not kind:
                raise ProtocolError(
                    f"the header's {name!r} must be {kind.__name__}, got {header.get(name)!r:.60}"
                )
        if header["protocol"] != PROTOCOL:
            raise ProtocolError(
                f"the other end speaks protocol {header['protocol']} (fedspan {header['version']:.20}), this one "
                f"{PROTOCOL} (fedspan {fedspan.__version__}); install the same fedspan on both"
            )
        one_of("status", header["status"], STATUSES)
        return RoundMessage(**{name: header[name] for name in HEADER}, arrays=arrays)

    @property
    def bytes(self) -> int:
        """The payload: bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())


def mark_of(arrays: wire.Arrays) -> int:
    """A hash of a reply's arrays, by which both ends know which update a state follows from."""
    return int(digest_of_arrays(arrays, size=7), 16) or 1


def under(prefix: str, arrays: wire.Arrays) -> wire.Arrays:
    """The arrays whose names begin with a prefix, without it."""
    return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}


class DroppedError(ProtocolError):
    """Why a reply does not count, and the kind of its event; a channel yields it in place of a reply.

    Args:
        text: The reason.
        kind: Of the event.
        sent: False if the message never left the server.
    """

    def __init__(self, text: str, kind: str = "no reply", sent: bool = True) -> None:
        super().__init__(text)
        self.kind, self.sent = kind, sent


class Channel(Protocol):
    """Carries messages to clients and returns their replies."""

    def deliver(
        self, messages: list[RoundMessage]
    ) -> Iterator[tuple[int, RoundMessage | DroppedError]]:
        """Yield (index of the message, its reply) as replies arrive; ends when the time is up or all have replied."""


@dataclass(frozen=True)
class Agreement:
    """What server and clients must have in common: the settings that decide the numbers, the seed and the model."""

    text: str  # JSON of dotted key → value

    @staticmethod
    def of(settings: Mapping[str, Any], layout: Layout, seed: int) -> Agreement:
        """From nested plain values. `layout` stands for the model's tensors and its frozen weights."""
        both = _flatten(settings) | {"seed": seed, "model": layout.fingerprint}
        return Agreement(json.dumps(both, sort_keys=True))

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of 12 characters."""
        return digest(self.text, size=6)

    @functools.cached_property
    def of_states(self) -> str:
        """The same of what clients keep states for: a resumed run may have another `lr`."""
        kept = json.loads(self.text) | {"method.lr": None}
        return digest(json.dumps(kept, sort_keys=True), size=6)

    def check(self, message: RoundMessage) -> None:
        """Raise unless the other end computes the same thing."""
        if message.fingerprint != self.fingerprint:
            raise ProtocolError(
                f"the other end has another method, model, seed or other settings (fingerprint "
                f"{message.fingerprint:.12}, here {self.fingerprint}); give both the same spec and frozen weights"
            )

    def explain(self, message: RoundMessage) -> str:
        """Why a client refused, by the first setting that differs where the client sent its own."""
        try:
            here, there = json.loads(self.text), dict(json.loads(message.settings))
        except (ValueError, TypeError, RecursionError):
            return message.reason
        differing = {key for key in {*here, *there} if here.get(key) != there.get(key)}
        if others := differing - {"model", KNOWN_START}:  # which explain why these differ
            key = min(others)
            client, server = (str(one.get(key, "the default"))[:60] for one in (there, here))
        elif "model" in differing:
            return (
                "the model differs: give both ends the same tensors, projection and frozen weights"
            )
        elif not differing:
            return message.reason
        elif KNOWN_START in here and KNOWN_START in there:
            return (
                f"the initial model differs, and with `{KNOWN_START}` clients are not sent it; give both ends the same "
                f"weights, or remove `{KNOWN_START}`"
            )
        else:
            key = KNOWN_START
            client, server = (str(key in one).lower() for one in (there, here))
        return (
            f"{key} is {client} on the client and {server} on the server; give both the same spec"
        )


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys. The patterns of a `rank` stay a list: the order in which they are tried decides the subspace."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        nested = isinstance(value, Mapping)
        if nested and key != "rank":
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = list(value.items()) if nested else value
    return flat


def check_arrays(arrays: wire.Arrays, expected: wire.Arrays) -> None:
    """Raise unless names, shapes and types are those expected and every number is finite."""
    if set(arrays) != set(expected):
        raise ProtocolError(f"the reply has arrays {sorted(arrays)}, expected {sorted(expected)}")
    for name, array in arrays.items():
        there, here = ((tuple(a.shape), a.dtype) for a in (array, expected[name]))
        if there != here:
            raise ProtocolError(f"array {name!r} is {there}, expected {here}")
        if array.is_floating_point() and array.numel() and not all_finite(array):
            raise ProtocolError(f"array {name!r} has values that are not finite")
