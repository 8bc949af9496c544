"""Compressors as values: how a vector of n numbers is sent in fewer bytes.

Each states what theory may assume. C is unbiased if E C(v) = v and E‖C(v) − v‖² ≤ ω‖v‖²; it is contractive if
E‖C(v) − v‖² ≤ (1 − δ)‖v‖² with δ > 0. Averages and SCALLION need the first, error feedback the second.

All randomness comes from `keys`, one 64-bit key per run and client, known to server and client: what follows from the
key is not sent. Decompression is plain sums and products of what was sent, so that both get the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedspan.core import seeds
from fedspan.core.encoded import Encoded
from fedspan.core.layout import Vector

if TYPE_CHECKING:
    from fedspan.core.round import Round


@dataclass(frozen=True, kw_only=True)
class Compressor(ABC):
    """A map from vectors to what is sent, and back.

    The length of what is sent depends on n only. Zeros come back as zeros. Numbers that are not finite never come back
    as finite ones, so that divergence is noticed.
    """

    @abstractmethod
    def compress(self, v: Vector, keys: seeds.Keys) -> Encoded:
        """What is sent of a vector.

        Args:
            v: (runs, clients, n) numbers.
            keys: One key per vector, (runs, clients); the only source of randomness.
        """

    @abstractmethod
    def decompress(self, encoded: Encoded, n: int, keys: seeds.Keys, dtype: torch.dtype) -> Vector:
        """C(v), from what was sent and the key with which it was made. Malformed input must not raise."""

    def omega(self, n: int) -> float | None:
        """ω for n numbers if the compressor is unbiased; None if it is biased."""
        return None

    def delta(self, n: int) -> float | None:
        """δ for n numbers if the compressor is contractive, as unbiased ones with ω < 1 are; None if not."""
        omega = self.omega(n)
        return None if omega is None or omega >= 1 else 1 - omega

    def keys(self, rnd: Round) -> seeds.Keys:
        """The keys of the uploads of a round, one per client."""
        return seeds.children(seeds.keys(rnd.seeds, "compress", rnd.t)[:, None], rnd.ids)

    def server_keys(self, rnd: Round, purpose: str = "broadcast") -> seeds.Keys:
        """The keys of what the server sends to all clients, one per run."""
        return seeds.keys(rnd.seeds, purpose, rnd.t)[:, None]


@dataclass(frozen=True, kw_only=True)
class Unbiased(Compressor):
    """A compressor that is unbiased, or divided by 1 + ω, which makes it contractive with δ = 1/(1 + ω)."""

    unbiased: bool = True  # false divides by 1 + ω, which makes it contractive

    @abstractmethod
    def variance(self, n: int) -> float:
        """ω without the division."""

    def factor(self, n: int) -> float:
        """What the unbiased values are multiplied by."""
        return 1.0 if self.unbiased else 1 / (1 + self.variance(n))

    def omega(self, n: int) -> float | None:
        return self.variance(n) if self.unbiased else None

    def delta(self, n: int) -> float | None:
        return super().delta(n) if self.unbiased else 1 / (1 + self.variance(n))
