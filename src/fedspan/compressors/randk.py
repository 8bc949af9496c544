"""Rand-k: k numbers at places that server and client draw from the shared seed, so that only the numbers are sent.

Multiplied by n/k it is unbiased with ω = n/k − 1. With `unbiased = false` it is contractive with δ = k/n.
"""

import functools
from dataclasses import dataclass

import numpy as np
import torch

from fedspan import Encoded, Vector, register
from fedspan.compressors._sparse import Sparse, spread
from fedspan.core import seeds
from fedspan.core.compressor import Unbiased


@register
@dataclass(frozen=True, kw_only=True)
class RandK(Unbiased, Sparse):
    """k numbers, and no places."""

    def compress(self, v: Vector, keys: seeds.Keys) -> Encoded:
        return Encoded(values=v.gather(-1, self._places(v.shape[-1], keys, v.device)))

    def decompress(self, encoded: Encoded, n: int, keys: seeds.Keys, dtype: torch.dtype) -> Vector:
        (values,) = encoded.take("values")
        values = values.to(dtype) * (n / self.kept(n) if self.unbiased else 1.0)
        return spread(values, self._places(n, keys, values.device), n)

    def variance(self, n: int) -> float:
        return n / self.kept(n) - 1

    def _places(self, n: int, keys: seeds.Keys, device: torch.device) -> torch.Tensor:
        if device.type == "meta":  # a dry run: the shape is all there is
            return torch.empty(*keys.shape, self.kept(n), dtype=torch.int64, device=device)
        return _drawn(keys.tobytes(), keys.shape, n, self.kept(n)).to(device)


@functools.lru_cache(maxsize=2)
def _drawn(keys: bytes, shape: tuple[int, ...], n: int, k: int) -> torch.Tensor:
    """Cached, because client step, client state and server of a round ask for the same places."""
    return torch.from_numpy(seeds.choose(np.frombuffer(keys, np.uint64).reshape(shape), n, k))
