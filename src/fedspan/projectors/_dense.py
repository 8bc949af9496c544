"""P of one block as an r × d array."""

import functools
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch

from fedspan.core import seeds
from fedspan.core.projector import Factor


@dataclass(frozen=True, eq=False)
class Dense(Factor):
    """P as an array (runs, r, d), in the type of the layout and in the float64 in which it was drawn."""

    p: torch.Tensor
    drawn: torch.Tensor

    @property
    def rank(self) -> int:
        return self.p.shape[1]

    def down(self, v: torch.Tensor) -> torch.Tensor:
        return torch.bmm(v, self.p.mT)

    def up(self, z: torch.Tensor) -> torch.Tensor:
        return torch.bmm(z, self.p)

    def columns(self) -> torch.Tensor:
        return self.p.mT

    def probe(self) -> torch.Tensor:
        """Σ h_jk P_jk with fixed h in (-1, 1)."""
        h = fixed_numbers(self.drawn[0].numel())
        return (self.drawn.flatten(1) @ h).view(-1, 1, 1)

    def to(self, device: torch.device) -> Self:
        """Return the same on another device; the drawn numbers stay, for the probe."""
        return replace(self, p=self.p.to(device))


@functools.lru_cache(maxsize=32)
def fixed_numbers(n: int) -> torch.Tensor:
    """Return n fixed numbers in (-1, 1), the same everywhere: the test vector of a probe."""
    keys = np.array([seeds.key(0, "probe")], np.uint64)
    return torch.from_numpy(2 * seeds.uniform(keys, n)[0] - 1)
