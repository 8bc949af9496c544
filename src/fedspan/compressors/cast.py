"""Numbers of 16 bits: float16 or bfloat16, after division by a power of two near the largest number.

The division keeps float16 from overflowing and from losing small vectors. Contractive, with 1 − δ below 2⁻²⁰ or 2⁻¹⁴.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from fedspan import Compressor, Encoded, Vector, register
from fedspan.compressors._levels import over, unit
from fedspan.core import seeds

KINDS = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@register
@dataclass(frozen=True, kw_only=True)
class Cast(Compressor):
    """2n bytes, and one scale."""

    to: Literal["float16", "bfloat16"] = "bfloat16"  # the type of the numbers in a message

    def compress(self, v: Vector, keys: seeds.Keys) -> Encoded:
        scale = unit(v)
        short = over(v, scale).to(KINDS[self.to])
        return Encoded(levels=short.contiguous().view(torch.uint8), scale=scale)

    def decompress(self, encoded: Encoded, n: int, keys: seeds.Keys, dtype: torch.dtype) -> Vector:
        packed, scale = encoded.take("levels", "scale")
        x = packed.contiguous().view(KINDS[self.to]).to(dtype)
        x = x.nan_to_num_(0.0).clamp_(-2, 2)  # malformed bytes must not become infinite
        return x * scale.to(dtype)

    def delta(self, n: int) -> float | None:
        # an error of half an eps; twice its square leaves room for rounding twice
        kind = torch.finfo(KINDS[self.to])
        return 1 - kind.eps**2 / 2 * (1 + n * kind.smallest_normal**2)
