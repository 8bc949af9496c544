"""Random changes to batches of images, by name."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from fedspan.core.config import Augment
from fedspan.nn.client_data import Batch


def _flip(batch: Batch, generator: torch.Generator) -> Batch:
    x, y = batch
    which = torch.rand(len(x), generator=generator) < 0.5
    return torch.where(which.view(-1, 1, 1, 1).to(x.device), x.flip(3), x), y


def _crop(batch: Batch, generator: torch.Generator) -> Batch:
    """Random places of the image in a frame of 4 empty pixels, and random flips."""
    x, y = _flip(batch, generator)
    n, _, height, width = x.shape
    down, across = torch.randint(0, 9, (2, n, 1), generator=generator)
    rows, columns = down + torch.arange(height), across + torch.arange(width)
    padded = F.pad(x, (4, 4, 4, 4)).permute(0, 2, 3, 1)
    picked = padded[torch.arange(n).view(-1, 1, 1), rows.unsqueeze(2), columns.unsqueeze(1)]
    return picked.permute(0, 3, 1, 2).contiguous(), y


AUGMENT: dict[str, Augment] = {"flip": _flip, "crop": _crop}
