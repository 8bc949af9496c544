"""Which tensors of a torch module are projected, which go whole, and why.

A covered weight belongs to a plain Linear, Conv1d, Conv2d or Embedding and is used through that layer alone: its
gradient is formed inside the subspace (`nn.layers`). Other large tensors fall back to a projected full gradient.
Biases, norms, small tensors and the output head are trained and sent whole.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from fedspan.core.errors import SpecError
from fedspan.core.layout import Block, Layout

LAYERS: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Embedding)
LEAST = 512  # smaller tensors go whole: their few numbers are not worth a subspace


@dataclass(frozen=True)
class Choice:
    """What becomes of one trained tensor."""

    name: str
    shape: tuple[int, ...]
    how: Literal["covered", "fallback", "whole"]
    why: str
    layer: str = ""  # the covered layer's name


def choose(
    model: nn.Module, whole: Sequence[str] = (), project: Sequence[str] = (), least: int = LEAST
) -> list[Choice]:
    """One choice for each tensor that requires a gradient, in the order of `named_parameters`."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not named:
        raise SpecError("the model has no parameter that requires a gradient")
    for pattern in (*whole, *project):
        if not any(fnmatch.fnmatch(name, pattern) for name in named):
            raise SpecError(
                f"{pattern!r} matches no trained tensor of the model; it has {', '.join(list(named)[:6])}, …"
            )
    uses = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    layers = {f"{name}.weight" if name else "weight": name for name, m in model.named_modules() if type(m) in LAYERS}
    head = next(
        (n for n in reversed(list(layers)) if not isinstance(model.get_submodule(layers[n]), nn.Embedding)), None
    )
    return [_choose_one(name, p, layers, head, uses[id(p)], whole, project, least) for name, p in named.items()]


def _choose_one(
    name: str,
    p: nn.Parameter,
    layers: dict[str, str],
    head: str | None,
    uses: int,
    whole: Sequence[str],
    project: Sequence[str],
    least: int,
) -> Choice:
    shape, asked = tuple(p.shape), any(fnmatch.fnmatch(name, pattern) for pattern in project)
    if any(fnmatch.fnmatch(name, pattern) for pattern in whole):
        return Choice(name, shape, "whole", "named in `whole`")
    if p.dim() < 2 or shape[1] < 2:
        return Choice(name, shape, "whole", "no input side to project")
    if not asked and name == head:
        return Choice(name, shape, "whole", "output head")
    if not asked and p.numel() < least:
        return Choice(name, shape, "whole", f"fewer than {least} numbers")
    if name not in layers:
        return Choice(name, shape, "fallback", "not a plain Linear, Conv1d, Conv2d or Embedding")
    if uses > 1:
        return Choice(name, shape, "fallback", f"tied: used in {uses} places")
    return Choice(name, shape, "covered", "", layers[name])


def layout_of(choices: Sequence[Choice], dtype: torch.dtype = torch.float32) -> Layout:
    """The flat vector of a model: axis 1 is the input side of every weight (channels, for a convolution)."""
    return Layout(tuple(Block(c.name, c.shape, None if c.how == "whole" else 1) for c in choices), dtype)


def summary(choices: Sequence[Choice]) -> str:
    """A line a tensor, for people."""
    width = max(len(c.name) for c in choices)
    return "\n".join(
        f"{c.name:{width}}  {c.how:8}  {'×'.join(map(str, c.shape)) or '1':16}  {c.why}".rstrip() for c in choices
    )
