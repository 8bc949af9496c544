"""Random changes to batches of images, by name: what `training.augment` may name."""

import functools
from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812

from fedspan.core.config import Augment
from fedspan.core.errors import SpecError, one_of, shown
from fedspan.core.plugins import guarded
from fedspan.nn.batches import Batch, on_tensors


def augmentation(given: str | Augment | None) -> Augment | None:
    """The function that a name stands for, or a user's own function, with its batches checked."""
    if isinstance(given, str):
        one_of("augment", given, AUGMENT)
        return functools.partial(_checked, AUGMENT[given], f"`augment` {given!r}")
    name = getattr(given, "__name__", type(given).__name__)
    return given and functools.partial(_checked, given, f"`augment` {name}")


def _checked(function: Augment, what: str, batch: Batch, generator: torch.Generator) -> Batch:
    """The batch that a function makes of another; it must have the same parts, and all of them as many rows."""
    call = functools.partial(function, batch, generator)
    found = guarded(call, f"{what}, a function of (batch, generator), fails")
    given = found if isinstance(found, Mapping | list | tuple) else ()
    old, new = (dict(one if isinstance(one, Mapping) else enumerate(one)) for one in (batch, given))
    rows = {len(part) for part in new.values() if isinstance(part, torch.Tensor)}
    kinds = [{key: type(part) for key, part in one.items()} for one in (old, new)]
    if kinds[0] == kinds[1] and len(rows) <= 1:
        return found if isinstance(batch, Mapping) else tuple(found)
    shapes = [on_tensors(lambda part: tuple(part.shape), one) for one in (batch, found)]  # type: ignore[arg-type, return-value]
    raise SpecError(
        f"{what} must return a batch such as it gets, of shapes {shapes[0]}, got {shown(shapes[1])}"
    )


def flip(batch: Batch, generator: torch.Generator) -> Batch:
    """Flips half of the images from left to right."""
    x, y = batch
    if x.dim() != 4:
        raise SpecError(
            f"it is for images, (channels, height, width) each; examples here are {tuple(x.shape[1:])}"
        )
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
