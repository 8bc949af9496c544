"""Randomized Hadamard rows: mixes inputs as well as gaussian, d log d work, no stored matrix, exact on any machine.

Works for any d, not only powers of two. d is split into powers of two (100 = 64 + 32 + 4), the inputs are shuffled and
get random signs, each piece has its own Walsh-Hadamard transform, and r of the d outputs are drawn. The rows are
orthonormal and each output is drawn with probability r/d, so P Pᵀ = I and E[PᵀP] = (r/d) I hold exactly.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from fedspan import Projector, register
from fedspan.core import seeds
from fedspan.core.projector import Factor
from fedspan.projectors._dense import Dense, fixed_numbers

SMALL = 512  # up to this many inputs a stored matrix is faster than the transform


@dataclass(frozen=True, eq=False)
class Walsh(Factor):
    """P = rows · blockdiag(H) · signs · shuffle, without storing it."""

    shuffle: torch.Tensor  # (runs, 1, d)
    signs: torch.Tensor  # (runs, 1, d)
    rows: torch.Tensor  # (runs, 1, r)

    @property
    def rank(self) -> int:
        return self.rows.shape[2]

    def down(self, v: torch.Tensor) -> torch.Tensor:
        mixed = transform(v.gather(2, self.shuffle.expand(v.shape)) * self.signs)
        return mixed.gather(2, self.rows.expand(-1, v.shape[1], -1))

    def up(self, z: torch.Tensor) -> torch.Tensor:
        full = z.new_zeros(*z.shape[:2], self.shuffle.shape[2])
        mixed = transform(full.scatter_(2, self.rows.expand(z.shape), z)) * self.signs
        return torch.empty_like(mixed).scatter_(2, self.shuffle.expand(mixed.shape), mixed)

    def columns(self) -> torch.Tensor:
        eye = torch.eye(self.rank, dtype=self.signs.dtype, device=self.signs.device)
        return self.up(eye.expand(len(self.rows), -1, -1)).mT

    def probe(self) -> torch.Tensor:
        """A fixed sum over rows, signs and shuffle."""
        d = self.shuffle.shape[2]
        h = fixed_numbers(d)
        order = (self.shuffle * self.signs).flatten(1).double() @ h
        return ((self.rows.flatten(1).double() @ h[: self.rank] + order) / d).view(-1, 1, 1)


def transform(v: torch.Tensor) -> torch.Tensor:
    """Return the orthonormal Walsh-Hadamard transform of the last axis, in pieces of powers of two; its own inverse."""
    n, pieces = v.shape[2], []
    powers = [1 << bit for bit in reversed(range(n.bit_length())) if n >> bit & 1]
    for piece in v.split(powers, 2):
        n, half = piece.shape[2], 1
        while half < n:
            a, b = piece.unflatten(2, (n // (2 * half), 2, half)).unbind(3)
            piece = torch.stack([a + b, a - b], 3).flatten(2, 4)
            half *= 2
        pieces.append(piece * (1 / math.sqrt(n)))
    return torch.cat(pieces, 2)


@register
@dataclass(frozen=True, kw_only=True)
class Hadamard(Projector):
    """r random rows of a randomized Hadamard matrix."""

    def factor(self, inputs: int, rank: int, keys: seeds.Keys, dtype: torch.dtype) -> Walsh | Dense:
        if inputs > SMALL:
            return self.walsh(inputs, rank, keys, dtype)
        p = self.walsh(inputs, rank, keys, torch.float64).columns().mT.contiguous()
        return Dense(p.to(dtype), p)

    def walsh(self, inputs: int, rank: int, keys: seeds.Keys, dtype: torch.dtype) -> Walsh:
        """Draw shuffle, signs and rows from three sub-streams."""
        own = [seeds.children(keys, np.full(keys.shape, part)) for part in range(3)]
        shuffle = torch.from_numpy(seeds.permute(own[0], inputs)).unsqueeze(1)
        signs = torch.from_numpy(2 * seeds.integers(own[1], inputs, 2) - 1).unsqueeze(1)
        rows = torch.from_numpy(seeds.choose(own[2], inputs, rank)).unsqueeze(1)
        return Walsh(shuffle, signs.to(dtype), rows)
