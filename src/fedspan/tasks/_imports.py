"""A user's own model, from a function that a spec names."""

from __future__ import annotations

from typing import Any

from torch import nn

from fedspan.core.errors import SpecError
from fedspan.core.plugins import called, load_module
from fedspan.core.seeds import torch_generator


def model_from(name: str, folder: str | None, seed: int) -> nn.Module:
    """What the function of a name such as `my_model:make` returns; its initial weights are decided by the seed."""
    where, _, function = name.partition(":")
    make: Any = getattr(load_module(where, folder, "task.model"), function, None)
    if not callable(make):
        found = "no function" if make is None else f"a {type(make).__name__}, not a function,"
        raise SpecError(f"`task.model` {name!r}: the module {where!r} has {found} {function!r}")
    with torch_generator(seed):
        model = called(make, f"`task.model` {name!r}: {function}")
    return checked_model(model, f"`task.model` {name!r} must return")


def checked_model(model: Any, what: str) -> nn.Module:
    """Refuses what cannot be trained; `what` begins the error, as in "`model` must be"."""
    if not isinstance(model, nn.Module):
        raise SpecError(f"{what} a torch.nn.Module, got {type(model).__name__}")
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise SpecError(
            f"{what} a model with weights, and this one is on the device 'meta', which holds none; load them on 'cpu'"
        )
    return model
