"""QSGD: each number is randomly rounded to one of s levels of the norm (Alistarh et al. 2017, arXiv:1610.02132).

C(v)_j = (‖v‖/s) sign(v_j) ξ_j, where ξ_j is s|v_j|/‖v‖ rounded up or down so that its mean is right. Unbiased with
ω = min(b/s², √b/s) for b numbers that share a norm. A model has too many numbers for one norm: with `bucket` each b
numbers have their own. Sign and level are sent as one of 2s + 1 whole numbers.
"""

import math
from dataclasses import dataclass

import torch

from fedspan import Encoded, Vector, register
from fedspan.compressors._levels import buckets, chance, norm, over
from fedspan.core import seeds
from fedspan.core.compressor import Unbiased
from fedspan.core.encoded import pack, unpack, width_of
from fedspan.core.errors import at_least, at_most


@register
@dataclass(frozen=True, kw_only=True)
class QSGD(Unbiased):
    """n values of a few bits, and a scale for each bucket."""

    bits: int = 4  # per value, with its sign: s = 2^(bits − 1) − 1 levels of each sign
    bucket: int | None = None  # b: numbers that share a norm; none: all of them

    def __post_init__(self) -> None:
        at_least("bits", self.bits, 2)
        at_most("bits", self.bits, 24)  # whole numbers that float32 can tell apart
        if self.bucket is not None:
            at_least("bucket", self.bucket, 1)

    @property
    def levels(self) -> int:
        """s, the levels of each sign; 7 for four bits."""
        return (1 << self.bits - 1) - 1

    def compress(self, v: Vector, keys: seeds.Keys) -> Encoded:
        n, s, parts = v.shape[-1], self.levels, buckets(v, self.bucket)
        scale = norm(parts) / s
        x = over(parts, scale).flatten(-2)[..., :n]
        size = x.abs()
        low = size.floor()
        level = (low + chance(size - low, keys)).copysign(x).clamp_(-s, s).nan_to_num_(0.0)
        return Encoded(levels=pack(level + s, width_of(2 * s)), scale=scale.squeeze(-1))

    def decompress(self, encoded: Encoded, n: int, keys: seeds.Keys, dtype: torch.dtype) -> Vector:
        packed, scale = encoded.take("levels", "scale")
        level = unpack(packed, width_of(2 * self.levels), n).to(dtype) - self.levels
        step = (scale.to(dtype) * self.factor(n)).unsqueeze(-1)
        return (buckets(level, self.bucket) * step).flatten(-2)[..., :n]

    def variance(self, n: int) -> float:
        b, s = min(n, self.bucket or n), self.levels
        return min(b / s**2, math.sqrt(b) / s)
