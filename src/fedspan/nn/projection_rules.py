"""Which tensors of a torch module are projected, which go whole, and why.

A covered weight belongs to a plain Linear, Conv1d, Conv2d or Embedding, or to the transposed Linear of GPT-2, and is
used through such layers alone: its gradient is formed inside the subspace (`nn.layers`). That holds for a weight tied
between an embedding and an output head as well. Other large tensors fall back to a projected full gradient. Biases,
norms, small tensors and an output head with a weight of its own are trained and sent whole.
"""

from __future__ import annotations

import fnmatch
import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from fedspan.core.errors import SpecError
from fedspan.core.layout import Block, Layout
from fedspan.nn.layers import is_transposed

LAYERS: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Embedding)
LEAST = 512  # smaller tensors go whole: their few numbers are not worth a subspace
SAMPLE = 4096  # numbers of a frozen tensor that are looked at to tell it from another

How = Literal["covered", "fallback", "whole"]


@dataclass(frozen=True)
class ProjectionRule:
    """What becomes of one trained tensor."""

    name: str
    shape: tuple[int, ...]
    how: How
    why: str
    layer: str = ""  # the covered layer's name
    also: tuple[str, ...] = ()  # the other layers that share the weight
    axis: int = 1  # the input side


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Take the named tensors out of training: they stay as they are, and are not sent."""
    named = dict(model.named_parameters())
    _must_match(patterns, named, "tensor")
    for name, parameter in named.items():
        if _named(name, patterns):
            parameter.requires_grad_(False)


def choose(
    model: nn.Module, whole: Sequence[str] = (), project: Sequence[str] = (), least: int = LEAST
) -> list[ProjectionRule]:
    """One choice for each tensor that requires a gradient, in the order of `named_parameters`."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not named:
        raise SpecError("the model has no parameter that requires a gradient")
    _must_match((*whole, *project), named, "trained tensor")
    uses = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    layers: dict[int, list[str]] = {}  # weight → the plain layers that have it
    head = None
    for name, module in model.named_modules():
        if type(module) in LAYERS or is_transposed(module):
            layers.setdefault(id(module.weight), []).append(name)
            head = head if isinstance(module, nn.Embedding) else id(module.weight)
    found = []
    for name, p in named.items():
        own = layers.get(id(p), [])
        sides = {0 if is_transposed(model.get_submodule(layer)) else 1 for layer in own}
        plain = len(sides) == 1 and len(own) == uses[id(p)]
        axis = sides.pop() if plain else 1
        how, why = _how(name, p, axis, plain, uses[id(p)], id(p) == head, whole, project, least)
        first, *others = own if how == "covered" else [""]
        found.append(ProjectionRule(name, tuple(p.shape), how, why, first, tuple(others), axis))
    return found


def _how(
    name: str,
    p: nn.Parameter,
    axis: int,
    plain: bool,
    uses: int,
    head: bool,
    whole: Sequence[str],
    project: Sequence[str],
    least: int,
) -> tuple[How, str]:
    asked = _named(name, project)
    tied = f"tied: used in {uses} places" if uses > 1 else ""
    if _named(name, whole):
        return "whole", "named in `whole`"
    if p.dim() < 2 or p.shape[axis] < 2:
        return "whole", "no input side to project"
    if not asked and head and not tied:
        return "whole", "output head"
    if not asked and p.numel() < least:
        return "whole", f"fewer than {least} numbers"
    if not plain:
        return "fallback", tied or "not a plain Linear, Conv1d, Conv2d or Embedding"
    return "covered", tied


def _named(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _must_match(patterns: Sequence[str], names: Iterable[str], what: str) -> None:
    names = list(names)
    for pattern in patterns:
        if not any(fnmatch.fnmatch(name, pattern) for name in names):
            raise SpecError(f"{pattern!r} matches no {what} of the model; it has {', '.join(names[:6])}, …")


def layout_of(choices: Sequence[ProjectionRule], dtype: torch.dtype = torch.float32, fixed: str = "") -> Layout:
    """The flat vector of a model; a weight is projected on its input side (channels, for a convolution)."""
    return Layout(tuple(Block(c.name, c.shape, None if c.how == "whole" else c.axis) for c in choices), dtype, fixed)


def digest(model: nn.Module) -> str:
    """What a model's frozen tensors are, by names, types, shapes and a sample of their numbers; empty: it has none."""
    frozen = [(name, p.detach().reshape(-1)) for name, p in model.named_parameters() if not p.requires_grad]
    found = hashlib.blake2b(digest_size=8)
    for name, flat in frozen:
        found.update(f"{name} {flat.dtype} {flat.numel()} ".encode())
        if flat.is_meta:  # an outline has no numbers
            continue
        found.update(flat[:: max(1, flat.numel() // SAMPLE)].to("cpu", torch.float64).numpy().tobytes())
    return found.hexdigest() if frozen else ""


def kept_in(weights: torch.dtype) -> torch.dtype:
    """The type of x, controls and steps. Weights in bfloat16 are roundings of a float32 x: its small steps add up."""
    if weights == torch.float16:
        raise SpecError("weights in float16 would need their loss scaled; use torch.bfloat16 or torch.float32")
    return torch.promote_types(weights, torch.float32)


def summary(choices: Sequence[ProjectionRule]) -> str:
    """A line a tensor, for people."""
    width = max(len(c.name) for c in choices)
    return "\n".join(
        f"{c.name:{width}}  {c.how:8}  {'×'.join(map(str, c.shape)) or '1':16}  {c.why}".rstrip() for c in choices
    )
