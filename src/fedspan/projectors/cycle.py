"""Coordinates in turn: a random order of the inputs, r after r of it, and a new order when all have had their turn.

E[PᵀP] = ρI holds for each round alone. No input waits for longer than two cycles, 2⌈1/ρ⌉ rounds, where fresh draws
leave one out for 1/ρ rounds on average and now and then for many more. The last round of a cycle whose length is no
multiple of r is filled up from the start of its order.
"""

from dataclasses import dataclass

import numpy as np
import torch

from fedspan import Layout, register
from fedspan.core import seeds
from fedspan.core.projector import Factor, LinearMap
from fedspan.projectors.coordinate import Coordinate, Picked


@register
@dataclass(frozen=True, kw_only=True)
class Cycle(Coordinate):
    """The inputs in a random order, r after r."""

    def of_epochs(self, layout: Layout, of_runs: tuple[int, ...], epochs: range) -> LinearMap:
        factors: list[Factor | None] = []
        for number, block in enumerate(layout.blocks):
            if block.axis is None:
                factors.append(None)
                continue
            rank, inputs = self.rank_of(block), block.inputs
            length = -(-inputs // rank)  # of a cycle
            cycles = range(epochs[0] // length, epochs[-1] // length + 1)
            keys = seeds.keys_of_rounds(of_runs, "projector", cycles, number)
            orders = seeds.permute(keys, inputs)  # (cycles, runs, inputs)
            turns = [
                orders[t // length - cycles[0]][:, (t % length * rank + np.arange(rank)) % inputs]
                for t in epochs
            ]
            index = torch.from_numpy(np.sort(np.concatenate(turns), -1))
            factors.append(Picked(index.unsqueeze(1), inputs, layout.dtype))
        return LinearMap(layout, tuple(factors))
