"""The two kinds of numbers in a reply: the payload, and statistics.

The payload is what the server adds up: it is screened, clipped, combined, masked and noised. Statistics are a few
numbers that a client measured on the way. Each has a range, outside of which no honest client's can be, and they are
averaged apart: every client counts once, whatever its weight. A client that measured nothing sends zeros.

The class of a reply says which fields are statistics, with the range of each number:

    test: Vector | None = field(default=None, metadata=statistics((-1, 1), (0, 1)))
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fedspan.core.round import Round

Ranges = tuple[tuple[float, float], ...]


def statistics(*ranges: tuple[float, float]) -> Mapping[str, Ranges]:
    """The metadata of a field of a reply that holds statistics: one range (lowest, highest) per number."""
    return {"ranges": ranges}


def _ranges_of(kind: type) -> dict[str, Ranges]:
    """Return the fields of a class of replies that are statistics, and their ranges."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return {one.name: one.metadata["ranges"] for one in fields if "ranges" in one.metadata}


ranges_of: Callable[[type], dict[str, Ranges]] = functools.cache(_ranges_of)


def payload(up: Any) -> dict[str, Any]:
    """The fields of a reply that the server adds up, by name."""
    apart = ranges_of(type(up))
    return {name: part for name, part in vars(up).items() if part is not None and name not in apart}


def statistics_in(up: Any) -> dict[str, torch.Tensor]:
    """The statistics of a reply, by name."""
    return {name: part for name in ranges_of(type(up)) if (part := getattr(up, name)) is not None}


def outside(kind: type, arrays: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """(runs, clients): whose statistics are not within their ranges; None if the arrays of replies hold none."""
    found = None
    for name, ranges in ranges_of(kind).items():
        if (part := arrays.get(name)) is not None:
            low, high = part.new_tensor(ranges).unbind(-1)
            wrong = ~((low <= part) & (part <= high)).all(-1)  # NaN is outside
            found = wrong if found is None else found | wrong
    return found


def weighted(up: Any, rnd: Round) -> Any:
    """Return the mean of the replies of a round by `Round.share`, from their mean by Σ_S w_i."""
    if rnd.weights is None or not rnd.unbiased:
        return up
    factor = rnd.weights.sum(1, keepdim=True) / rnd.share
    return dataclasses.replace(up, **{name: factor * part for name, part in payload(up).items()})
