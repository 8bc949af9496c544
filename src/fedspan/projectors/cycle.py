"""Coordinates in turn: a random order of the inputs, r after r of it, and a new order when all have had their turn.

E[PᵀP] = ρI holds for each round alone. No input waits for longer than two cycles, 2⌈1/ρ⌉ rounds, where fresh draws
leave one out for 1/ρ rounds on average and now and then for many more. The last round of a cycle whose length is no
multiple of r is filled up from the start of its order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fedspan import Layout, register
from fedspan.core import seeds
from fedspan.core.layout import Block
from fedspan.core.linear_map import Factor, LinearMap
from fedspan.projectors.coordinate import Coordinate, Picked


@register
@dataclass(frozen=True, kw_only=True)
class Cycle(Coordinate):
    """The inputs in a random order, r after r."""

    def of_epochs(self, layout: Layout, of_runs: tuple[int, ...], epochs: range) -> LinearMap:
        factors: list[Factor | None] = [
            None if block.axis is None else self._turn(number, block, layout.dtype, of_runs, epochs)
            for number, block in enumerate(layout.blocks)
        ]
        probe = torch.zeros(len(epochs) * len(of_runs), 1, 1, dtype=torch.float64)
        return LinearMap(
            layout, tuple(factors), sum((f.probe() for f in factors if f is not None), start=probe)
        )

    def _turn(
        self, number: int, block: Block, dtype: torch.dtype, of_runs: tuple[int, ...], epochs: range
    ) -> Picked:
        """The inputs of one block whose turn it is in each epoch."""
        rank, inputs = self.rank_of(block), block.inputs
        length = -(-inputs // rank)
        cycles = range(epochs[0] // length, epochs[-1] // length + 1)
        keys = seeds.keys_of_rounds(of_runs, "projector", cycles, number)
        orders = np.argsort(seeds.bits(keys.reshape(-1), inputs), -1, kind="stable").reshape(
            *keys.shape, inputs
        )
        places = [(epoch % length * rank + np.arange(rank)) % inputs for epoch in epochs]
        turns = [
            orders[epoch // length - cycles[0]][:, at]
            for epoch, at in zip(epochs, places, strict=True)
        ]
        return Picked(
            torch.from_numpy(np.sort(np.concatenate(turns), -1)).unsqueeze(1), inputs, dtype
        )
