"""The whole space: P = I. Makes SSF equal to SCAFFOLD, with d numbers per message."""

from dataclasses import dataclass

import torch

from fedspan import Block, Projector, register
from fedspan.core import seeds
from fedspan.core.projector import Rank


@register
@dataclass(frozen=True, kw_only=True)
class Identity(Projector):
    """No projection; `rank` has no effect."""

    rank: Rank = 1.0  # has no effect

    def rank_of(self, block: Block) -> int:
        return block.inputs

    def factor(self, inputs: int, rank: int, keys: seeds.Keys, dtype: torch.dtype) -> None:
        """Every block is sent in full."""
