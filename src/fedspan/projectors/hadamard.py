"""Randomized Hadamard rows: mixes inputs as well as gaussian, d log d work, no stored matrix, exact on any machine.

Works for any d, not only powers of two. d is split into powers of two (100 = 64 + 32 + 4), the inputs are shuffled and
get random signs, each piece has its own Walsh-Hadamard transform, and r of the d outputs are drawn. The rows are
orthonormal and each output is drawn with probability r/d, so P Pᵀ = I and E[PᵀP] = (r/d) I hold exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fedspan import Projector, register
from fedspan.core import seeds
from fedspan.projectors._dense import Dense, fixed_numbers

SMALL = 512  # up to this many inputs a stored matrix is faster than the transform
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Walsh:
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
        eye = torch.eye(self.rank, dtype=self.signs.dtype, device=self.signs.device).expand(
            self.rows.shape[0], -1, -1
        )
        return self.up(eye).mT

    def probe(self) -> torch.Tensor:
        """A fixed sum over rows, signs and shuffle."""
        d = self.shuffle.shape[2]
        h = fixed_numbers(d)
        order = (self.shuffle * self.signs).flatten(1).double() @ h
        return ((self.rows.flatten(1).double() @ h[: self.rank] + order) / d).view(-1, 1, 1)

    def cut(self, runs: slice) -> Walsh:
        return Walsh(self.shuffle[runs], self.signs[runs], self.rows[runs])

    def to(self, device: torch.device) -> Walsh:
        return Walsh(self.shuffle.to(device), self.signs.to(device), self.rows.to(device))


def transform(v: torch.Tensor) -> torch.Tensor:
    """The orthonormal Walsh-Hadamard transform of the last axis, in pieces of powers of two; its own inverse."""
    pieces = []
    for piece in v.split(powers(v.shape[2]), 2):
        n = piece.shape[2]
        half = 1
        while half < n:
            pairs = piece.unflatten(2, (n // (2 * half), 2, half))
            a, b = pairs.unbind(3)
            piece = torch.stack([a + b, a - b], 3).flatten(2, 4)
            half *= 2
        pieces.append(piece * (1 / math.sqrt(n)))
    return torch.cat(pieces, 2) if len(pieces) > 1 else pieces[0]


def powers(n: int) -> list[int]:
    """n as a sum of decreasing powers of two."""
    return [1 << bit for bit in reversed(range(n.bit_length())) if n >> bit & 1]


@register
@dataclass(frozen=True, kw_only=True)
class Hadamard(Projector):
    """r random rows of a randomized Hadamard matrix."""

    def factor(self, inputs: int, rank: int, keys: seeds.Keys, dtype: torch.dtype) -> Walsh | Dense:
        """Draw shuffle, signs and rows from three sub-streams."""
        own = [seeds.children(keys, np.full(keys.shape, part)) for part in range(3)]
        shuffle = seeds.permute(own[0], inputs)
        signs = 2 * seeds.integers(own[1], inputs, 2) - 1
        rows = seeds.choose(own[2], inputs, rank)
        if inputs <= SMALL:
            p = torch.from_numpy(written_out(shuffle, signs, rows))
            return Dense(p.to(dtype), p)
        parts = torch.from_numpy(shuffle), torch.from_numpy(signs).to(dtype), torch.from_numpy(rows)
        return Walsh(*(part.unsqueeze(1) for part in parts))


def written_out(shuffle: Ints, signs: Ints, rows: Ints) -> npt.NDArray[np.float64]:
    """The same P as an array (runs, r, d): ± 1/√n where row and column lie in one piece of n, sign by their bits."""
    sizes = powers(shuffle.shape[1])
    piece = np.repeat(np.arange(len(sizes)), sizes)
    inside = np.concatenate([np.arange(n) for n in sizes])
    odd = np.bitwise_count(inside[rows][:, :, None] & inside) & 1  # (runs, r, d)
    scale = (piece[rows][:, :, None] == piece) / np.sqrt(np.repeat(sizes, sizes))
    mixed: npt.NDArray[np.float64] = np.where(odd, -scale, scale) * signs[:, None, :]
    out = np.empty_like(mixed)
    np.put_along_axis(out, np.broadcast_to(shuffle[:, None, :], mixed.shape), mixed, 2)
    return out
