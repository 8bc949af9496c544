"""The whole space: P = I. Turns SSF into SCAFFOLD and costs d numbers a message."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedspan.core import seeds
from fedspan.core.projector import Projector
from fedspan.core.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class Identity(Projector):
    """No projection; `rank` has nothing to say."""

    rank: int | float = 1.0

    def factor(self, inputs: int, rank: int, keys: seeds.Keys, dtype: torch.dtype) -> None:
        """Every block goes whole."""
