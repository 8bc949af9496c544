"""Random coordinates: r of the d inputs, drawn without replacement. Needs no products, and is exact on any machine."""

from dataclasses import dataclass, field

import torch

from fedspan import Projector, register
from fedspan.core import seeds
from fedspan.core.projector import Factor
from fedspan.projectors._dense import fixed_numbers


@dataclass(frozen=True, eq=False)
class Picked(Factor):
    """P as the inputs that it keeps, (runs, 1, r)."""

    index: torch.Tensor = field()  # not the None of other factors
    inputs: int
    dtype: torch.dtype

    @property
    def rank(self) -> int:
        return self.index.shape[2]

    def down(self, v: torch.Tensor) -> torch.Tensor:
        return v.gather(2, self.index.expand(-1, v.shape[1], -1))

    def up(self, z: torch.Tensor) -> torch.Tensor:
        full = z.new_zeros(*z.shape[:2], self.inputs)
        return full.scatter_(2, self.index.expand(-1, z.shape[1], -1), z)

    def columns(self) -> torch.Tensor:
        runs, _, r = self.index.shape
        zero = self.index.new_zeros(runs, self.inputs, r, dtype=self.dtype)
        return zero.scatter_(1, self.index, 1.0)

    def probe(self) -> torch.Tensor:
        """Σ_k h_k · index_k / d with fixed h."""
        found = self.index.flatten(1).double() @ fixed_numbers(self.rank)
        return found.view(-1, 1, 1) / self.inputs


@register
@dataclass(frozen=True, kw_only=True)
class Coordinate(Projector):
    """A uniformly random set of r inputs."""

    def factor(self, inputs: int, rank: int, keys: seeds.Keys, dtype: torch.dtype) -> Picked:
        """Draw r of the inputs."""
        index = torch.from_numpy(seeds.choose(keys, inputs, rank))
        return Picked(index.unsqueeze(1), inputs, dtype)
