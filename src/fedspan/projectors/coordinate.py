"""Random coordinates: r of the d inputs, drawn without replacement. Needs no products, and is exact on any machine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedspan import Projector, register
from fedspan.core import seeds
from fedspan.projectors._dense import fixed_numbers


@dataclass(frozen=True, eq=False)
class Picked:
    """P as the inputs that it keeps, (runs, 1, r)."""

    index: torch.Tensor
    inputs: int
    dtype: torch.dtype

    @property
    def rank(self) -> int:
        return self.index.shape[2]

    def down(self, v: torch.Tensor) -> torch.Tensor:
        if self.index.shape[0] == 1:  # one run: whole columns, which is much faster
            return (
                v[0].index_select(1, self.index[0, 0]).unsqueeze(0)
            )  # twice as fast as of three axes
        return v.gather(2, self.index.expand(-1, v.shape[1], -1))

    def up(self, z: torch.Tensor) -> torch.Tensor:
        full = z.new_zeros(*z.shape[:2], self.inputs)
        if self.index.shape[0] == 1:
            return full.index_copy_(2, self.index[0, 0], z)
        return full.scatter_(2, self.index.expand(-1, z.shape[1], -1), z)

    def columns(self) -> torch.Tensor:
        zero = torch.zeros(
            self.index.shape[0], self.inputs, self.rank, dtype=self.dtype, device=self.index.device
        )
        return zero.scatter_(1, self.index, 1.0)

    def probe(self) -> torch.Tensor:
        """Σ_k h_k · index_k / d with fixed h."""
        return (self.index.flatten(1).double() @ fixed_numbers(self.rank)).view(
            -1, 1, 1
        ) / self.inputs

    def cut(self, runs: slice) -> Picked:
        return Picked(self.index[runs], self.inputs, self.dtype)

    def to(self, device: torch.device) -> Picked:
        return Picked(self.index.to(device), self.inputs, self.dtype)


@register
@dataclass(frozen=True, kw_only=True)
class Coordinate(Projector):
    """A uniformly random set of r inputs."""

    def factor(self, inputs: int, rank: int, keys: seeds.Keys, dtype: torch.dtype) -> Picked:
        """Draw r of the inputs."""
        index = torch.from_numpy(seeds.choose(keys, inputs, rank))
        return Picked(index.unsqueeze(1), inputs, dtype)
