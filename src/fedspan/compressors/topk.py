"""Top-k: the k numbers of largest absolute value, and their places. Contractive with δ = k/n.

With `chunk` each c numbers keep their own k, and δ is k/c. A place then takes ⌈log2 c⌉ bits, and no part of the vector
is left out because another one is larger.
"""

from dataclasses import dataclass

import torch

from fedspan import Encoded, Vector, register
from fedspan.compressors._levels import buckets
from fedspan.compressors._sparse import Sparse, spread
from fedspan.core import seeds
from fedspan.core.encoded import pack, unpack, width_of
from fedspan.core.errors import at_least


@register
@dataclass(frozen=True, kw_only=True)
class TopK(Sparse):
    """k numbers and k places of ⌈log2 n⌉ bits."""

    chunk: int | None = None  # c: numbers of which k are kept; none: all of them

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk is not None:
            at_least("chunk", self.chunk, 1)

    def sizes(self, n: int) -> tuple[int, int]:
        """Return c of a vector of n numbers, and k of each chunk."""
        c = min(n, self.chunk or n)
        return c, super().kept(c)

    def kept(self, n: int) -> int:
        c, k = self.sizes(n)
        return n // c * k + min(k, n % c)

    def compress(self, v: Vector, keys: seeds.Keys) -> Encoded:
        n, (c, k) = v.shape[-1], self.sizes(v.shape[-1])
        large = buckets(v.abs(), c)
        if n % c:  # what fills the last chunk is never kept
            large[..., -1, n % c :] = -1
        index = torch.topk(large, k, sorted=False).indices.sort().values
        index = index.flatten(-2)[..., : self.kept(n)]
        places = index + self._starts(n, index)
        return Encoded(values=v.gather(-1, places), index=pack(index, width_of(c - 1)))

    def decompress(self, encoded: Encoded, n: int, keys: seeds.Keys, dtype: torch.dtype) -> Vector:
        values, packed = encoded.take("values", "index")
        width = width_of(self.sizes(n)[0] - 1)
        index = unpack(packed, width, values.shape[-1]).long()
        index = (index + self._starts(n, index)).clamp_(max=n - 1)  # one too large must not raise
        return spread(values.to(dtype), index, n)

    def _starts(self, n: int, index: torch.Tensor) -> torch.Tensor:
        """Return the first place of the chunk of each kept number."""
        c, k = self.sizes(n)
        return torch.arange(index.shape[-1], device=index.device).div_(k, rounding_mode="floor") * c

    def delta(self, n: int) -> float | None:
        c, k = self.sizes(n)
        return k / c
