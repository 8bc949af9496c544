"""The place of each named tensor of a model in the flat vector, and the axis along which it is projected.

A Vector is a tensor of shape (runs, clients, size): `runs` independent repetitions (seeds) that are computed together,
`clients` the cohort, or 1 for what the server holds. One run on one client is (1, 1, size). Everything broadcasts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedspan.core.digest import digest
from fedspan.core.errors import SpecError

Vector = Tensor
"""A tensor of shape (runs, clients, size): seeds that are computed together, the clients of a round (one for what the
server holds), and the values of the model or of the subspace."""

Arrays = dict[str, Tensor]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Seeds = tuple[int, ...]  # one per run
Floats = npt.NDArray[np.float64]
Measures = Mapping[str, Floats]  # name → one value per run


def all_finite(v: Vector) -> bool:
    """Return whether all values are finite; without a vector of answers."""
    low, high = torch.aminmax(v)
    return bool(torch.isfinite(low) & torch.isfinite(high))


@dataclass(frozen=True)
class Block:
    """One tensor of the model."""

    name: str  # as in `model.state_dict()`
    shape: tuple[int, ...]  # of the tensor
    axis: int | None = None  # the input side, which a projector shortens; None: sent in full

    @cached_property
    def size(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    @cached_property
    def input_axis(self) -> int:
        """The projected axis of a block that has one."""
        assert self.axis is not None
        return self.axis

    @cached_property
    def inputs(self) -> int:
        """Length of the projected axis."""
        return self.shape[self.input_axis]

    @cached_property
    def rest(self) -> int:
        """Length of the other axes together."""
        return self.size // self.inputs

    @cached_property
    def inputs_last(self) -> bool:
        """Whether the projected axis is the last one, so that no transposition is needed."""
        return self.input_axis == len(self.shape) - 1

    def rows(self, v: Vector) -> Tensor:
        """Return the block's part of a vector as rows along the projected axis: (runs, clients · rest, inputs)."""
        moved: Vector = v.unflatten(-1, self.shape).movedim(self.input_axis + 2, -1)
        return moved.reshape(v.shape[0], -1, self.inputs)

    def vector(self, rows: Tensor, clients: int) -> Vector:
        """Return the inverse of `rows`: (runs, clients · rest, inputs) → (runs, clients, size)."""
        shape = list(self.shape)
        shape.append(shape.pop(self.input_axis))
        runs = rows.shape[0]
        moved = rows.reshape(runs, clients, *shape).movedim(-1, self.input_axis + 2)
        return moved.reshape(runs, clients, self.size)


@dataclass(frozen=True, eq=False)
class Layout:
    """The blocks of a model in order, and the type of their values."""

    blocks: tuple[Block, ...]  # every trained tensor, in the order of the flat vector
    dtype: torch.dtype = torch.float32  # of the flat vector
    fixed: str = ""  # a digest of the frozen parts of the model, which are never sent and must be the same everywhere

    @cached_property
    def sizes(self) -> list[int]:
        """The number of elements of each block."""
        return [block.size for block in self.blocks]

    @cached_property
    def size(self) -> int:
        """d: the length of the flat vector."""
        return sum(self.sizes)

    @cached_property
    def fingerprint(self) -> str:
        """A short hash; server and clients must have the same."""
        text = repr([(b.name, b.shape, b.axis) for b in self.blocks]) + str(self.dtype) + self.fixed
        return digest(text)

    def split(self, v: Vector) -> Arrays:
        """Return views of a (runs, clients, size) vector, each (runs, clients, *shape)."""
        if v.shape[-1] != self.size:
            raise SpecError(f"a vector of this layout has {self.size} values, got {v.shape[-1]}")
        parts = zip(self.blocks, v.split(self.sizes, -1), strict=True)
        return {block.name: part.view(*part.shape[:-1], *block.shape) for block, part in parts}

    def join(self, tensors: Arrays) -> Vector:
        """Return the flat vector of tensors shaped (runs, clients, *shape)."""
        parts = (tensors[block.name] for block in self.blocks)
        flat = [part.reshape(*part.shape[:2], -1) for part in parts]
        return torch.cat(flat, -1).to(self.dtype)
