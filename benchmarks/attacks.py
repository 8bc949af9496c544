"""Hostile clients in a simulation, for benchmarks and tests: what they send is changed after their honest work."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from fedspan.core.encoded import Encoded
from fedspan.core.reply import Ranges, ranges_of
from fedspan.core.round import Round
from fedspan.engine import simulator

Change = Callable[[torch.Tensor], torch.Tensor]


def times(factor: float) -> Change:
    """Replies are multiplied; −1 turns them around."""
    return lambda v: v * factor


def filled(number: float) -> Change:
    """Every number of a reply is this one."""
    return lambda v: torch.full_like(v, number)


@contextmanager
def hostile(
    clients: Collection[int], change: Change, rounds: Collection[int] | None = None
) -> Iterator[None]:
    """Within it, the numbers that these clients send are changed, in all rounds or in some; of codes, their scales."""
    names = vars(simulator)
    honest: Any = names["local_work"]

    def local_work(*arguments: Any) -> Any:
        new, up, beside = honest(*arguments)
        rnd: Round = arguments[-1]
        if rounds is None or rnd.t in rounds:
            up = _changed(
                up, torch.from_numpy(np.isin(rnd.ids, list(clients))).unsqueeze(-1), change
            )
        return new, up, beside

    names["local_work"] = local_work
    try:
        yield
    finally:
        names["local_work"] = honest


def _within(value: torch.Tensor, ranges: Ranges | None) -> torch.Tensor:
    """Statistics as far off as they may be; others would have the whole reply left out."""
    return value if ranges is None else value.clamp(*value.new_tensor(ranges).unbind(-1))


def _changed(message: Any, who: torch.Tensor, change: Change) -> Any:
    values, ranges = {}, ranges_of(type(message))
    for field in dataclasses.fields(message):
        value = getattr(message, field.name)
        if isinstance(value, Encoded):
            value = _changed(value, who, change)
        elif isinstance(value, torch.Tensor) and value.is_floating_point():
            value = torch.where(who, _within(change(value), ranges.get(field.name)), value)
        values[field.name] = value
    return type(message)(**values)
