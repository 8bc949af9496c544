"""Rand-k: k numbers at places that both ends draw from the common seed, so that only the numbers travel.

Times n/k it is unbiased with ω = n/k − 1; `unbiased = false` leaves the numbers as they are, contractive with δ = k/n.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedspan.compressors._sparse import Sparse, spread
from fedspan.core import seeds
from fedspan.core.compressor import Unbiased
from fedspan.core.encoded import Encoded
from fedspan.core.layout import Vector
from fedspan.core.method import Round
from fedspan.core.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class RandK(Unbiased, Sparse):
    """k numbers and nothing else."""

    common: bool = False  # all clients of a round keep the same coordinates

    def compress(self, v: Vector, keys: seeds.Keys) -> Encoded:
        return Encoded(values=v.gather(-1, self._places(v.shape[-1], keys, v.device)))

    def decompress(self, code: Encoded, n: int, keys: seeds.Keys, dtype: torch.dtype) -> Vector:
        (values,) = code.take("values")
        values = values.to(dtype) * (n / self.kept(n) if self.unbiased else 1.0)
        return spread(values, self._places(n, keys, values.device), n)

    def variance(self, n: int) -> float:
        return n / self.kept(n) - 1

    def keys(self, rnd: Round) -> seeds.Keys:
        return super().keys(replace(rnd, ids=np.zeros_like(rnd.ids)) if self.common else rnd)

    def _places(self, n: int, keys: seeds.Keys, device: torch.device) -> torch.Tensor:
        if device.type == "meta":  # a dry run: the shape is all there is
            return torch.empty(*keys.shape, self.kept(n), dtype=torch.int64, device=device)
        return _drawn(keys.tobytes(), keys.shape, n, self.kept(n)).to(device)


@functools.lru_cache(maxsize=2)
def _drawn(keys: bytes, shape: tuple[int, ...], n: int, k: int) -> torch.Tensor:
    """Kept, because a round asks for the same places at the client, in settling its state, and at the server."""
    return torch.from_numpy(seeds.choose(np.frombuffer(keys, np.uint64).reshape(shape), n, k))
