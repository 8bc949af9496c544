"""The two kinds of numbers in a reply: the payload, and statistics.

The payload is what the server adds up: it is screened, clipped, combined, masked and noised. Statistics are a few
numbers that a client measured on the way. Each has a range, outside of which no honest client's can be, and they are
averaged apart: every client counts once, whatever its weight. A client that measured nothing sends zeros.

The name of such a part begins with stat_, and `Method.statistics` has the range of each of its numbers:
{"stat_test": ((-1, 1), (0, 1))}.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fedspan.core.bundle import Bundle
from fedspan.core.errors import SpecError
from fedspan.core.round import Round

STATISTIC = "stat_"
Ranges = tuple[tuple[float, float], ...]


def payload(up: Bundle) -> dict[str, Any]:
    """Return the parts of a reply that the server adds up, by name."""
    return {name: part for name, part in vars(up).items() if not name.startswith(STATISTIC)}


def statistics_in(up: Bundle) -> dict[str, torch.Tensor]:
    """Return the statistics of a reply, by name."""
    return {name: part for name, part in vars(up).items() if name.startswith(STATISTIC)}


def outside(
    statistics: Mapping[str, Ranges], arrays: Mapping[str, torch.Tensor]
) -> torch.Tensor | None:
    """(runs, clients): whose statistics are not within their ranges; None if the arrays of replies hold none."""
    found = None
    for name, part in arrays.items():
        if name.startswith(STATISTIC):
            if name not in statistics:
                raise SpecError(
                    f"replies have {name!r}; give its ranges in `statistics` of the method"
                )
            low, high = part.new_tensor(statistics[name]).unbind(-1)
            wrong = ~((low <= part) & (part <= high)).all(-1)  # NaN is outside
            found = wrong if found is None else found | wrong
    return found


def weighted(up: Bundle, rnd: Round) -> Bundle:
    """Return the mean of the replies of a round by `Round.share`, from their mean by Σ_S w_i."""
    if rnd.weights is None or not rnd.unbiased:
        return up
    factor = rnd.weights.sum(1, keepdim=True) / rnd.share
    return up.replace(**{name: factor * part for name, part in payload(up).items()})
