"""One shape for states and messages: named parts, each a tensor, a compressed vector, a log or a download of x.

A reply has two kinds of parts. The payload is what the server adds up: it is screened, clipped, combined, masked and
noised. Statistics are a few values that a client measured on the way. Each has a range, outside of which no honest
client's can be, and they are averaged apart: every client counts once, whatever its weight. A client that measured
nothing sends zeros. The name of such a part begins with stat_, and `Method.statistics` has the range of each of its
values: {"stat_test": ((-1, 1), (0, 1))}.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fedspan.core.errors import ProtocolError, SpecError
from fedspan.core.layout import Arrays
from fedspan.core.round import Round

STATISTIC = "stat_"
Ranges = tuple[tuple[float, float], ...]


class MissingPartError(ProtocolError, AttributeError):
    """A state or message lacks a part that the method needs."""


class Bundle:
    """Named parts that do not change: `Bundle(x=x, c=c).c`. A part that is None is left out."""

    def __init__(self, **parts: Any) -> None:
        own = self.__dict__
        for name, part in parts.items():
            if part is not None:
                own[name] = part

    def __getattr__(self, name: str) -> Any:
        has = ", ".join(vars(self)) or "none"
        raise MissingPartError(
            f"there is no part {name!r}, only {has}; both ends must run the same method and settings"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Bundle does not change; use replace({name}=…)")

    def __repr__(self) -> str:
        return f"Bundle({', '.join(vars(self))})"

    def get(self, name: str) -> Any:
        """Return a part, or None if it is not there."""
        return vars(self).get(name)

    def replace(self, **parts: Any) -> Bundle:
        """Return a bundle with other parts; one that is None is left out."""
        if not parts:
            return self
        new = object.__new__(Bundle)
        own = new.__dict__
        own.update(self.__dict__)
        for name, part in parts.items():
            if part is not None:
                own[name] = part
            else:
                own.pop(name, None)
        return new


def payload(up: Bundle) -> dict[str, Any]:
    """Return the parts of a reply that the server adds up, by name."""
    return {name: part for name, part in vars(up).items() if not name.startswith(STATISTIC)}


def statistics_in(up: Bundle) -> Arrays:
    """Return the statistics of a reply, by name."""
    return {name: part for name, part in vars(up).items() if name.startswith(STATISTIC)}


def outside(
    statistics: Mapping[str, Ranges], arrays: Mapping[str, torch.Tensor]
) -> torch.Tensor | None:
    """Return whose statistics are not within their ranges, (runs, clients); None if replies hold none."""
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
