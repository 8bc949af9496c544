"""Natural compression: each number is randomly rounded to a power of two (Horváth et al. 2022, arXiv:1905.10988).

Only sign and exponent are sent. The powers go down from the one above the largest number, as many as `bits` can
encode: 127 in a byte. Smaller numbers are rounded to the smallest power or to zero. Unbiased with
ω = 1/8 + n/4^(powers − 1), whose second term is negligible for 8 bits.
"""

from dataclasses import dataclass

import torch

from fedspan import Encoded, Vector, register
from fedspan.compressors._levels import chance, over, unit
from fedspan.core import seeds
from fedspan.core.compressor import Unbiased
from fedspan.core.encoded import pack, unpack
from fedspan.core.errors import at_least, at_most


@register
@dataclass(frozen=True, kw_only=True)
class Natural(Unbiased):
    """n numbers of `bits` bits, and one scale."""

    bits: int = 8  # bits per number, for sign and exponent

    def __post_init__(self) -> None:
        at_least("bits", self.bits, 2)
        at_most("bits", self.bits, 8)  # which hold every exponent of a float32

    @property
    def powers(self) -> int:
        """The number of powers of two besides zero: 2, 1, 1/2, … times the scale."""
        return (1 << self.bits - 1) - 1

    def compress(self, v: Vector, keys: seeds.Keys) -> Encoded:
        scale = unit(v)
        x = over(v, scale)
        size, least = x.abs(), 2.0 ** (2 - self.powers)
        mantissa, exponent = torch.frexp(size)  # size = mantissa · 2^exponent, mantissa in [1/2, 1)
        small = size < least
        up = chance(torch.where(small, size / least, 2 * mantissa - 1), keys)
        level = torch.where(small, 0, exponent + (self.powers - 2)) + up
        level = level.clamp_(0, self.powers)  # only numbers that are not finite exceed it
        return Encoded(levels=pack(level + (x < 0) * (self.powers + 1), self.bits), scale=scale)

    def decompress(self, encoded: Encoded, n: int, keys: seeds.Keys, dtype: torch.dtype) -> Vector:
        packed, scale = encoded.take("levels", "scale")
        sizes = [0.0] + [2.0 ** (1 - power) for power in reversed(range(self.powers))]
        table = torch.tensor(sizes + [-size for size in sizes], dtype=dtype, device=packed.device)
        return table[unpack(packed, self.bits, n).int()] * (scale.to(dtype) * self.factor(n))

    def variance(self, n: int) -> float:
        return 1 / 8 + n / 4.0 ** (self.powers - 1)
