"""Screening: a reply that is far larger than those of other clients is left out, as if it had not come.

A finite number of 3e38 passes every other check and ends a run: the next sum overflows. Replies are compared with the
usual norm, the largest median norm of a round so far. The median of a round alone would not do: once most clients fit
their data, their replies are almost zero, and an honest one that still learns is a million times larger.

The norm is that of the payload. A reply whose statistics are outside their ranges is left out as well (`core.bundle`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from fedspan.core.bundle import Bundle, Ranges, outside, payload
from fedspan.core.encoded import Encoded
from fedspan.core.errors import CheckpointError
from fedspan.core.layout import Vector
from fedspan.core.wire import check_forms

PIECE = 1 << 20  # numbers of a reply that are squared at once
LEAST = 3  # replies of a round from which their median tells what is usual
Norms = list[list[float]]  # of every client of every run
KINDS = ("its norm", "the norm of its buffers")
OUTSIDE = "its statistics are outside their ranges"


class Outlier(NamedTuple):
    """A reply that is left out."""

    run: int
    place: int  # in the cohort
    why: str


class Screen:
    """What is usual in a run, and which replies are not."""

    def __init__(
        self, factor: float | None, runs: int = 1, statistics: Mapping[str, Ranges] | None = None
    ) -> None:
        self.statistics = statistics or {}
        self.factor = factor  # None: nothing is left out
        self._sizes: list[Norms] = []  # of a round's replies that are judged one by one
        self.usual = [[0.0] * runs for _ in KINDS]  # the largest median norm of a round so far

    def outliers(self, up: Any, buffers: Vector | None = None) -> list[Outlier]:
        """Those of a round's replies, which count in what is usual."""
        found = impossible(up, self.statistics)
        if self.factor is not None:
            found += self.judge(norms(payload(up).values()))
            found += [] if buffers is None else self.judge(norms([buffers]), 1)
        return found

    def one_of(self, up: Any) -> list[Outlier]:
        """The same of one of a round's replies, compared with earlier rounds: those of this one are not all there."""
        found = impossible(up, self.statistics)
        if self.factor is not None:
            self._sizes.append(norms(payload(up).values()))
            found += self.judge(self._sizes[-1], count=False)
        return found

    def all_came(self) -> None:
        """The replies since the last call were all of a round: they count in what is usual."""
        if self._sizes:
            sizes = zip(*self._sizes, strict=True)
            self.judge([[size for (size,) in of_run] for of_run in sizes])
        self._sizes = []

    def judge(self, sizes: Norms, kind: int = 0, count: bool = True) -> list[Outlier]:
        """The same for norms; without `count` they do not change what is usual."""
        assert self.factor is not None
        found = []
        for run, row in enumerate(sizes):
            ordered, usual = sorted(row), self.usual[kind][run]
            median = ordered[(len(row) - 1) // 2]
            if count and len(row) >= LEAST and usual < median < math.inf:
                usual = self.usual[kind][run] = median
            most = self.factor * usual
            if most and not ordered[-1] <= most:
                # NaN and infinity are no lies but divergence, which must show
                far = [place for place, size in enumerate(row) if most < size < math.inf]
                found += [
                    Outlier(run, place, _why(row[place], usual, KINDS[kind])) for place in far
                ]
        return found

    def save(self) -> torch.Tensor:
        """What a resumed run needs."""
        return torch.tensor(self.usual, dtype=torch.float64)

    def load(self, saved: torch.Tensor) -> None:
        """Puts back what `save` gave."""
        check_forms({"usual": saved}, {"usual": self.save()})
        if not bool((saved >= 0).all()):
            raise CheckpointError(
                "the checkpoint is damaged: its usual norms are impossible; start the run again"
            )
        self.usual = saved.tolist()


def impossible(up: Bundle, statistics: Mapping[str, Ranges]) -> list[Outlier]:
    """Those replies of a round whose statistics no honest client could have measured."""
    wrong = outside(statistics, vars(up))
    if wrong is None or not wrong.any():
        return []
    return [
        Outlier(run, place, f"reply left out: {OUTSIDE}") for run, place in wrong.nonzero().tolist()
    ]


def _why(size: float, usual: float, what: str) -> str:
    return (
        f"reply left out: {what}, {size:.3g}, is {size / usual:.3g} times the median, {usual:.3g}"
    )


def norms(parts: Iterable[Any]) -> Norms:
    """‖reply‖ of each client over all numbers of its parts; of codes, over their scales and values."""
    found = [_size(part) for part in _floats(parts)]
    whole = found[0] if len(found) == 1 else torch.stack(found).norm(dim=0)
    sizes: Norms = whole.tolist()
    return sizes


def _size(v: Vector) -> torch.Tensor:
    # in float64, in which no square of a float32 overflows; torch makes a copy in that type, so piece by piece
    size: torch.Tensor
    if v.shape[-1] > PIECE:
        size = torch.stack([_size(part) for part in v.split(PIECE, -1)]).norm(dim=0)
    else:
        size = torch.linalg.vector_norm(v, dim=-1, dtype=torch.float64)
    return size


def _floats(parts: Iterable[Any]) -> list[Vector]:
    """The tensors of numbers in parts, those inside codes as well."""
    found = []
    for part in parts:
        if isinstance(part, Encoded):
            found += _floats(part.parts.values())
        elif isinstance(part, torch.Tensor) and part.is_floating_point():
            found.append(part)
    return found
