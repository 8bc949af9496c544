"""Local steps with moments, and a small layout."""

from __future__ import annotations

import torch

from fedspan.core.layout import Block, Layout

LR, STEPS = 0.02, 3


def layout() -> Layout:
    return Layout((Block("w", (4, 9), 1), Block("b", (4,))), torch.float64)
