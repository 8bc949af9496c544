"""One compressor applied to what another keeps, such as QSGD of the k largest numbers.

If E‖v − inner(v)‖² ≤ (1 − δ_i)‖v‖² and the kept numbers are unchanged, δ = δ_outer δ_inner. Two unbiased compressors
are together unbiased with 1 + ω = (1 + ω_outer)(1 + ω_inner).
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from fedspan import Compressor, Encoded, SpecError, Vector, register
from fedspan.compressors._sparse import Sparse
from fedspan.core import seeds
from fedspan.core.registry import name_of
from fedspan.core.tables import accept_choices


@register
@dataclass(frozen=True, kw_only=True)
class Compose(Compressor):
    """Places as `inner` sends them, and the numbers there compressed by `outer`."""

    outer: Compressor  # compresses the kept numbers, such as qsgd
    inner: Compressor  # selects the numbers to keep: topk or randk

    def __post_init__(self) -> None:
        accept_choices(self)
        if not isinstance(self.inner, Sparse):
            raise SpecError(
                f"`inner` must keep some of the numbers, as topk and randk do, got {name_of(self.inner)!r}"
            )
        if isinstance(self.outer, Sparse | Compose):
            raise SpecError(
                f"`outer` must not be sparse, got {name_of(self.outer)!r}; give `inner` a smaller k"
            )

    def compress(self, v: Vector, keys: seeds.Keys) -> Encoded:
        kept = self.inner.compress(v, _part(keys, 0))
        (values,) = kept.take("values")
        return replace(self.outer.compress(values, _part(keys, 1)), index=kept.index)

    def decompress(self, encoded: Encoded, n: int, keys: seeds.Keys, dtype: torch.dtype) -> Vector:
        values = self.outer.decompress(encoded, self._kept(n), _part(keys, 1), dtype)
        return self.inner.decompress(
            Encoded(values=values, index=encoded.index), n, _part(keys, 0), dtype
        )

    def omega(self, n: int) -> float | None:
        outer, inner = self.outer.omega(self._kept(n)), self.inner.omega(n)
        return None if outer is None or inner is None else (1 + outer) * (1 + inner) - 1

    def delta(self, n: int) -> float | None:
        if self.inner.omega(n) is not None:  # the kept numbers are enlarged
            return super().delta(n)
        outer, inner = self.outer.delta(self._kept(n)), self.inner.delta(n)
        return None if outer is None or inner is None else outer * inner

    def _kept(self, n: int) -> int:
        assert isinstance(self.inner, Sparse)
        return self.inner.kept(n)


def _part(keys: seeds.Keys, number: int) -> seeds.Keys:
    return seeds.children(keys, np.full(keys.shape, number))
