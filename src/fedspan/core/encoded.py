"""A compressed vector as it is sent: named tensors whose last axis is the packed payload.

Whole numbers of `width` bits are packed without gaps: eight of them fill `width` bytes. So four bits cost four bits,
and the ledger counts what is packed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from fedspan.core.errors import ProtocolError
from fedspan.core.layout import Vector


@dataclass(frozen=True, eq=False)
class Encoded:
    """(runs, clients, n) numbers after compression; each part is (runs, clients, its own length)."""

    values: Vector | None = None  # the kept numbers
    index: Tensor | None = None  # packed: the places of the kept numbers
    levels: Tensor | None = None  # packed: each number in a few bits
    scale: Vector | None = None  # the size of one level

    @property
    def parts(self) -> dict[str, Tensor]:
        """The parts that are not None, by name."""
        return {name: part for name, part in vars(self).items() if part is not None}

    def take(self, *names: str) -> tuple[Tensor, ...]:
        """Return parts that must be present."""
        for name in names:
            if name not in self.parts:
                raise ProtocolError(
                    f"the compressed vector has no {name!r}; both ends must use the same compressor"
                )
        return tuple(self.parts[name] for name in names)

    @property
    def bytes(self) -> int:
        """Payload per client."""
        return sum(part.shape[-1] * part.element_size() for part in self.parts.values())


def width_of(most: int) -> int:
    """Bits that hold the whole numbers from 0 to `most`."""
    return max(1, most.bit_length())


def pack(numbers: Tensor, width: int) -> Tensor:
    """(…, n) whole numbers below 2^width as (…, ⌈n · width / 8⌉) bytes."""
    n, kind = numbers.shape[-1], torch.uint8 if width <= 8 else torch.int64
    groups: Tensor = torch.nn.functional.pad(numbers.to(kind), (0, -n % 8)).unflatten(-1, (-1, 8))
    out = groups.new_zeros(*groups.shape[:-1], width, dtype=torch.uint8)
    for number, byte, shift in _overlaps(width):
        part = groups[..., number]
        part = part << shift if shift >= 0 else part >> -shift
        out[..., byte] |= part if width <= 8 else (part & 255).to(torch.uint8)
    return out.flatten(-2)[..., : -(-n * width // 8)]


def unpack(packed: Tensor, width: int, n: int) -> Tensor:
    """The n whole numbers that `pack` packed: bytes up to eight bits, int64 above."""
    missing = -(-n // 8) * width - packed.shape[-1]
    groups: Tensor = torch.nn.functional.pad(packed, (0, missing)).unflatten(-1, (-1, width))
    groups = groups if width <= 8 else groups.long()
    out = groups.new_zeros(*groups.shape[:-1], 8)
    for number, byte, shift in _overlaps(width):
        part = groups[..., byte]
        out[..., number] |= part >> shift if shift >= 0 else part << -shift
    return (out & ((1 << width) - 1)).flatten(-2)[..., :n]


@functools.lru_cache(maxsize=64)
def _overlaps(width: int) -> tuple[tuple[int, int, int], ...]:
    """(number, byte, shift to the left of the number in that byte) for each overlap of the two in a group."""
    return tuple(
        (number, byte, number * width - 8 * byte)
        for number in range(8)
        for byte in range(number * width // 8, (number * width + width - 1) // 8 + 1)
    )
