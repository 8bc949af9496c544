"""Hostile clients in a simulation, for benchmarks and tests: what they send is changed after their honest work."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from fedspan.core.bundle import Bundle, Ranges
from fedspan.core.encoded import Encoded
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
            who = torch.from_numpy(np.isin(rnd.ids, list(clients))).unsqueeze(-1)
            up = Bundle(**_changed(vars(up), who, change, arguments[0].statistics))
        return new, up, beside

    names["local_work"] = local_work
    try:
        yield
    finally:
        names["local_work"] = honest


def _within(value: torch.Tensor, ranges: Ranges | None) -> torch.Tensor:
    """Statistics as far off as they may be; others would have the whole reply left out."""
    return value if ranges is None else value.clamp(*value.new_tensor(ranges).unbind(-1))


def _changed(
    parts: Mapping[str, Any], who: torch.Tensor, change: Change, statistics: Mapping[str, Ranges]
) -> dict[str, Any]:
    """Return the parts of a message in which some clients send other numbers."""
    values = {}
    for name, value in parts.items():
        if isinstance(value, Encoded):
            value = Encoded(**_changed(value.parts, who, change, {}))
        elif isinstance(value, torch.Tensor) and value.is_floating_point():
            value = torch.where(who, _within(change(value), statistics.get(name)), value)
        values[name] = value
    return values
