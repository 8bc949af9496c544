"""Uniformly random subspace: a Gaussian matrix orthonormalized by QR (the paper's choice).

Drawn and orthonormalized in float64 on the CPU, with fixed signs of QR, and cast last. Before the cast, thread counts
and instruction sets agree far below 1e-12; `coordinate` and `hadamard` agree in every bit.
"""

from dataclasses import dataclass

import torch

from fedspan import Projector, register
from fedspan.core import seeds
from fedspan.projectors._dense import Dense


@register
@dataclass(frozen=True, kw_only=True)
class Gaussian(Projector):
    """A uniformly distributed r-dimensional subspace."""

    def factor(self, inputs: int, rank: int, keys: seeds.Keys, dtype: torch.dtype) -> Dense:
        """Q of the QR of a d × r Gaussian matrix, transposed, with R's diagonal made positive."""
        g = torch.from_numpy(seeds.normal(keys, inputs * rank)).view(-1, inputs, rank)
        q, r = torch.linalg.qr(g)
        p = (q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).mT.contiguous()
        return Dense(p.to(dtype), p)
