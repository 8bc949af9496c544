"""Top-k: the k numbers of largest absolute value, and their places. Contractive with δ = k/n."""

from dataclasses import dataclass

import torch

from fedspan import Encoded, Vector, register
from fedspan.compressors._sparse import Sparse, spread
from fedspan.core import seeds
from fedspan.core.encoded import pack, unpack, width_of


@register
@dataclass(frozen=True, kw_only=True)
class TopK(Sparse):
    """k numbers and k places of ⌈log2 n⌉ bits."""

    def compress(self, v: Vector, keys: seeds.Keys) -> Encoded:
        n = v.shape[-1]
        index = torch.topk(v.abs(), self.kept(n), sorted=False).indices.sort().values
        return Encoded(values=v.gather(-1, index), index=pack(index, width_of(n - 1)))

    def decompress(self, encoded: Encoded, n: int, keys: seeds.Keys, dtype: torch.dtype) -> Vector:
        values, packed = encoded.take("values", "index")
        index = unpack(packed, width_of(n - 1), values.shape[-1]).long()
        index.clamp_(max=n - 1)  # a malformed index must not raise
        return spread(values.to(dtype), index, n)

    def delta(self, n: int) -> float | None:
        return self.kept(n) / n
