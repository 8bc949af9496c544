"""No compression: all n numbers as they are. Makes every compressed method its uncompressed form."""

from dataclasses import dataclass

import torch

from fedspan import Compressor, Encoded, Vector, register
from fedspan.core import seeds


@register
@dataclass(frozen=True, kw_only=True)
class Identity(Compressor):
    """C(v) = v: n numbers."""

    def compress(self, v: Vector, keys: seeds.Keys) -> Encoded:
        return Encoded(values=v)

    def decompress(self, encoded: Encoded, n: int, keys: seeds.Keys, dtype: torch.dtype) -> Vector:
        (values,) = encoded.take("values")
        return values.to(dtype)

    def omega(self, n: int) -> float | None:
        return 0.0
