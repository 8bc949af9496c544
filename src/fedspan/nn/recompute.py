"""Outputs of covered Linear layers that the backward pass makes again from their inputs instead of keeping them.

What follows a layer keeps the layer's output: an activation function its argument, attention its queries, keys and
values. A covered Linear keeps next to nothing itself, so its output can be exchanged for its input, which is narrower
(a feed-forward layer widens fourfold) or shared (queries, keys and values have one). Numbers stay the same to the last
bit; the price is one more product for each output that somebody keeps.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from fedspan.core.errors import FedspanError

Tensor = torch.Tensor
MADE = "fedspan_made"  # of a storage: how what lies in it was made; it lives as long as the storage


@dataclass(frozen=True, eq=False)
class Made:
    """y = x Wᵀ + b, and in which state x and y were then."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    x_version: int
    y_version: int


@dataclass(frozen=True, eq=False)
class View:
    """A part of such a y, by its place in memory."""

    made: Made
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


def remember(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y, with a note of how it was made where it is no narrower than x."""
    if y.shape[-1] >= x.shape[-1]:
        made = Made(x.detach(), weight.detach(), None if bias is None else bias.detach(), x._version, y._version)
        setattr(y.untyped_storage(), MADE, made)
    return y


def exchanging() -> contextlib.AbstractContextManager[Any]:
    """While a forward pass runs in it, outputs with a note are not kept for the backward pass but made again."""
    return torch.autograd.graph.saved_tensors_hooks(_give, _take)


def _give(kept: Tensor) -> Tensor | View:
    made: Made | None = getattr(kept.untyped_storage(), MADE, None)
    if made is None or kept._version != made.y_version:  # changed in place since: only it knows what it is now
        return kept
    return View(made, kept.shape, kept.stride(), int(kept.storage_offset()))


def _take(held: Tensor | View) -> Tensor:
    if isinstance(held, Tensor):
        return held
    made = held.made
    if made.x._version != made.x_version:
        raise FedspanError("a layer's input was changed in place after the layer; train without `recompute`")
    with torch.no_grad():
        return F.linear(made.x, made.weight, made.bias).as_strided(held.shape, held.stride, held.offset)
