"""Random changes to batches of images, by name: what `training.augment` may name."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from fedspan.core.config import Augment
from fedspan.core.errors import one_of
from fedspan.nn.client_data import Batch


def augmentation(given: str | Augment | None) -> Augment | None:
    """The function that a name stands for; a function stays what it is."""
    if not isinstance(given, str):
        return given
    one_of("augment", given, AUGMENT)
    return AUGMENT[given]


def flip(batch: Batch, generator: torch.Generator) -> Batch:
    """Flips half of the images from left to right."""
    x, y = batch
    which = torch.rand(len(x), generator=generator) < 0.5
    return torch.where(which.view(-1, 1, 1, 1).to(x.device), x.flip(3), x), y


def crop(batch: Batch, generator: torch.Generator) -> Batch:
    """Pads the images by 4 empty pixels, crops them at random places, and flips half of them."""
    x, y = flip(batch, generator)
    n, _, height, width = x.shape
    down, across = torch.randint(0, 9, (2, n, 1), generator=generator)
    rows, columns = down + torch.arange(height), across + torch.arange(width)
    padded = F.pad(x, (4, 4, 4, 4)).permute(0, 2, 3, 1)
    picked = padded[torch.arange(n).view(-1, 1, 1), rows.unsqueeze(2), columns.unsqueeze(1)]
    return picked.permute(0, 3, 1, 2).contiguous(), y


AUGMENT: dict[str, Augment] = {"flip": flip, "crop": crop}
