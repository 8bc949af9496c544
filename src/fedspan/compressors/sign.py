"""Signs, one bit per number, times the mean absolute value (Karimireddy et al. 2019, arXiv:1901.09847).

C(v) = (‖v‖₁/n) sign(v) is the vector nearest to v whose entries have equal size. Contractive with δ = ‖v‖₁²/(n‖v‖²), at
least 1/n. With `bucket` each b numbers have their own mean, and δ is at least 1/b.

With `sizes` = 2 a second bit says whether |v_j| is above the mean, and each half has its own mean: two bits per number,
nearer to v than signs. With `sizes` = 0 all entries are ±1, as in signSGD, and ± is drawn for an entry of zero. That is
neither unbiased nor contractive.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from fedspan import Compressor, Encoded, Vector, register
from fedspan.compressors._levels import buckets, chance, over
from fedspan.core import seeds
from fedspan.core.encoded import pack, unpack
from fedspan.core.errors import at_least


@register
@dataclass(frozen=True, kw_only=True)
class Sign(Compressor):
    """n bits, and a scale for each bucket."""

    bucket: int | None = None  # b: numbers that share a mean; none: all of them
    sizes: Literal[0, 1, 2] = 1  # sizes of a bucket: its mean, two means, or none: ±1

    def __post_init__(self) -> None:
        if self.bucket is not None:
            at_least("bucket", self.bucket, 1)

    @property
    def bits(self) -> int:
        """Bits per number."""
        return 2 if self.sizes == 2 else 1

    def compress(self, v: Vector, keys: seeds.Keys) -> Encoded:
        sizes = buckets(v.abs(), self.bucket)
        if self.sizes == 0:
            up, scale = v >= 0, sizes.amax(-1)
            if not v.is_meta and not v.all():
                up = torch.where(v == 0, chance(torch.full_like(v, 0.5), keys), up)
            return Encoded(levels=pack(up, 1), scale=over(scale, scale))
        # the last bucket may not be full
        counts = buckets(v.new_ones(v.shape[-1]), self.bucket).sum(-1)
        mean = sizes.sum(-1) / counts
        if self.sizes == 1:
            return Encoded(levels=pack(v >= 0, 1), scale=mean)
        large = sizes > mean.unsqueeze(-1)
        above, most = (sizes * large).sum(-1), large.sum(-1)
        below = (sizes * ~large).sum(-1) / (counts - most).clamp(min=1)
        scale = torch.stack([below, above / most.clamp(min=1)], -1).flatten(-2)
        large = large.flatten(-2)[..., : v.shape[-1]]
        return Encoded(levels=pack((v >= 0) + 2 * large, 2), scale=scale)

    def decompress(self, encoded: Encoded, n: int, keys: seeds.Keys, dtype: torch.dtype) -> Vector:
        packed, scale = encoded.take("levels", "scale")
        level, scale = unpack(packed, self.bits, n), scale.to(dtype)
        signs = buckets((level & 1).to(dtype) * 2 - 1, self.bucket)
        if self.sizes == 2:
            below, above = scale.unflatten(-1, (-1, 2)).unsqueeze(-2).unbind(-1)
            size = torch.where(buckets(level, self.bucket) > 1, above, below)
        else:
            size = scale.unsqueeze(-1)
        return (signs * size).flatten(-2)[..., :n]

    def delta(self, n: int) -> float | None:
        return None if self.sizes == 0 else 1 / min(n, self.bucket or n)
