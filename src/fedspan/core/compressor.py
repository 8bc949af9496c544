"""Compressors as values: how a vector of n numbers is sent in fewer bytes than it has.

Each says what theory may count on. C is unbiased if E C(v) = v and E‖C(v) − v‖² ≤ ω‖v‖²; it is contractive if
E‖C(v) − v‖² ≤ (1 − δ)‖v‖² with δ > 0. Averages and SCALLION need the first, error feedback the second.

Whatever is random comes from `keys`, one 64-bit key a run and client, which both ends know: what follows from the key
need not travel. Decompressing is plain sums and products of what arrived, so that both ends get the same bits.
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
    from fedspan.core.method import Round


@dataclass(frozen=True, kw_only=True)
class Compressor(ABC):
    """A map from vectors to codes and back.

    Every code of n numbers has the same length, whatever they are. Zeros come back as zeros. Numbers that are not
    finite never come back as finite ones, so that a run that diverges is seen to.
    """

    @abstractmethod
    def compress(self, v: Vector, keys: seeds.Keys) -> Encoded:
        """The code of (runs, clients, n) numbers; `keys` is (runs, clients)."""

    @abstractmethod
    def decompress(self, code: Encoded, n: int, keys: seeds.Keys, dtype: torch.dtype) -> Vector:
        """C(v), from the code and the key with which it was made. Codes of strangers must not raise."""

    def omega(self, n: int) -> float | None:
        """ω of an unbiased compressor of n numbers; None: it is biased."""
        return None

    def delta(self, n: int) -> float | None:
        """δ of a contractive compressor of n numbers; None: it is not. Unbiased with ω < 1 is contractive."""
        omega = self.omega(n)
        return None if omega is None or omega >= 1 else 1 - omega

    def keys(self, rnd: Round) -> seeds.Keys:
        """The keys of a round's uploads, one a client."""
        return seeds.children(seeds.keys(rnd.seeds, "compress", rnd.t)[:, None], rnd.ids)


@dataclass(frozen=True, kw_only=True)
class Unbiased(Compressor):
    """A compressor that is unbiased, or divided by 1 + ω: then it shrinks, and is contractive with δ = 1/(1 + ω)."""

    unbiased: bool = True

    @abstractmethod
    def variance(self, n: int) -> float:
        """ω before any division."""

    def factor(self, n: int) -> float:
        """What the unbiased number is multiplied by."""
        return 1.0 if self.unbiased else 1 / (1 + self.variance(n))

    def omega(self, n: int) -> float | None:
        return self.variance(n) if self.unbiased else None

    def delta(self, n: int) -> float | None:
        return super().delta(n) if self.unbiased else 1 / (1 + self.variance(n))
