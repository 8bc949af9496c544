"""What server and clients say to each other across a wire: a small header of plain values and named flat arrays.

A letter names its protocol, its fedspan version and a fingerprint of the method and the model, so that two ends that
do not compute the same thing part with one clear sentence.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

import fedspan
from fedspan.core import registry, wire
from fedspan.core.errors import ProtocolError, one_of
from fedspan.core.layout import Layout
from fedspan.core.method import Method

PROTOCOL = 1
Status = Literal["train", "ok", "lost", "refused", "failed"]
STATUSES: tuple[Status, ...] = ("train", "ok", "lost", "refused", "failed")
HEADER: dict[str, type] = {
    "protocol": int, "version": str, "fingerprint": str, "status": str, "t": int, "client": int, "seq": int,
    "reason": str, "cast": str,
}  # fmt: skip
CASTS = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
REASON = 300  # characters of a reason that are kept


@dataclass(frozen=True, eq=False)
class RoundMessage:
    """One message of a round, in either direction."""

    status: Status
    t: int
    client: int  # its number among the N clients
    seq: int  # updates of this client that the server has accepted before this round
    fingerprint: str
    arrays: wire.Arrays = field(default_factory=dict)
    reason: str = ""
    cast: str = "float32"  # how the arrays of a reply are rounded on the wire
    protocol: int = PROTOCOL
    version: str = fedspan.__version__

    def header(self) -> dict[str, Any]:
        """Its plain values."""
        return {name: getattr(self, name) for name in HEADER}

    @staticmethod
    def read(header: dict[str, Any], arrays: wire.Arrays) -> RoundMessage:
        """A letter from what came over the wire; every value checked."""
        for name, kind in HEADER.items():
            if type(header.get(name)) is not kind:
                raise ProtocolError(f"the header's {name!r} must be {kind.__name__}, got {header.get(name)!r:.60}")
        if header["protocol"] != PROTOCOL:
            raise ProtocolError(
                f"the other end speaks protocol {header['protocol']} (fedspan {header['version']:.20}), this one "
                f"{PROTOCOL} (fedspan {fedspan.__version__}); install the same fedspan on both"
            )
        one_of("status", header["status"], STATUSES)
        one_of("cast", header["cast"], CASTS)
        return RoundMessage(**{name: header[name] for name in HEADER}, arrays=arrays)

    @property
    def bytes(self) -> int:
        """Payload: the bytes of its arrays."""
        return sum(array.numel() * array.element_size() for array in self.arrays.values())

    def matches(self, fingerprint: str) -> None:
        """Raise unless both ends compute the same thing."""
        if self.fingerprint != fingerprint:
            raise ProtocolError(
                f"the other end runs another method or model (fingerprint {self.fingerprint:.12}, here {fingerprint}); "
                "give both the same spec and the same frozen weights"
            )


def fingerprint(method: Method[Any, Any, Any, Any], layout: Layout, seed: int) -> str:
    """Name, hyper-parameters, model layout, frozen weights and seed, in 12 characters."""
    text = json.dumps([registry.describe(method), layout.fingerprint, seed], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def rounded(arrays: wire.Arrays, cast: str) -> wire.Arrays:
    """Floating arrays in a shorter type; float64 (probes) and whole numbers stay."""
    kind = CASTS[cast]
    if kind is None:
        return arrays
    return {name: a.to(kind) if a.dtype == torch.float32 else a for name, a in arrays.items()}


def restored(arrays: wire.Arrays, cast: str, dtype: torch.dtype) -> wire.Arrays:
    """The same back in the model's type."""
    kind = CASTS[cast]
    return arrays if kind is None else {name: a.to(dtype) if a.dtype == kind else a for name, a in arrays.items()}


def same_shapes(arrays: wire.Arrays, wanted: wire.Arrays) -> None:
    """Raise unless names, shapes and types are those wanted and every number is finite."""
    if set(arrays) != set(wanted):
        raise ProtocolError(f"the reply has arrays {sorted(arrays)}, wanted {sorted(wanted)}")
    for name, array in arrays.items():
        if array.shape != wanted[name].shape or array.dtype != wanted[name].dtype:
            there, here = ((tuple(a.shape), a.dtype) for a in (array, wanted[name]))
            raise ProtocolError(f"array {name!r} is {there}, wanted {here}")
        if array.is_floating_point() and not math.isfinite(float(array.sum())) and not torch.isfinite(array).all():
            raise ProtocolError(f"array {name!r} has values that are not finite")
