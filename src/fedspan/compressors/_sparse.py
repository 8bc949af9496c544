"""What compressors that keep k of the n numbers share."""

from dataclasses import dataclass

import torch

from fedspan import Compressor, SpecError, Vector
from fedspan.core.errors import count_or_ratio


@dataclass(frozen=True, kw_only=True)
class Sparse(Compressor):
    """Keeps k of the n numbers."""

    k: int | float = 0.1  # how many numbers are kept: a number (20) or a share (0.1)

    def __post_init__(self) -> None:
        count_or_ratio("k", self.k)

    def kept(self, n: int) -> int:
        """k of a vector of n numbers."""
        if isinstance(self.k, float):
            return max(1, round(self.k * n))
        if self.k > n:
            raise SpecError(
                f"`k` {self.k} is larger than the {n} numbers there are; use at most {n}, or a ratio"
            )
        return self.k


def spread(values: Vector, index: torch.Tensor, n: int) -> Vector:
    """n numbers: the values at the places of the index, zeros elsewhere."""
    return values.new_zeros(*values.shape[:-1], n).scatter_(-1, index, values)
