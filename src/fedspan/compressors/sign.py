"""Signs, one bit per number, times the mean absolute value (Karimireddy et al. 2019, arXiv:1901.09847).

C(v) = (‖v‖₁/n) sign(v) is the vector nearest to v whose entries have equal size. Contractive with δ = ‖v‖₁²/(n‖v‖²), at
least 1/n. With `bucket` each b numbers have their own mean, and δ is at least 1/b.
"""

from dataclasses import dataclass

import torch

from fedspan import Compressor, Encoded, Vector, register
from fedspan.compressors._levels import buckets
from fedspan.core import seeds
from fedspan.core.encoded import pack, unpack
from fedspan.core.errors import at_least


@register
@dataclass(frozen=True, kw_only=True)
class Sign(Compressor):
    """n bits, and a scale for each bucket."""

    bucket: int | None = None  # b: numbers that share a mean; none: all of them

    def __post_init__(self) -> None:
        if self.bucket is not None:
            at_least("bucket", self.bucket, 1)

    def compress(self, v: Vector, keys: seeds.Keys) -> Encoded:
        sizes = buckets(v.abs(), self.bucket)
        # the last bucket may not be full
        counts = buckets(v.new_ones(v.shape[-1]), self.bucket).sum(-1)
        return Encoded(levels=pack(v >= 0, 1), scale=sizes.sum(-1) / counts)

    def decompress(self, encoded: Encoded, n: int, keys: seeds.Keys, dtype: torch.dtype) -> Vector:
        packed, scale = encoded.take("levels", "scale")
        signs = buckets(unpack(packed, 1, n).to(dtype) * 2 - 1, self.bucket)
        return (signs * scale.to(dtype).unsqueeze(-1)).flatten(-2)[..., :n]

    def delta(self, n: int) -> float | None:
        return 1 / min(n, self.bucket or n)
