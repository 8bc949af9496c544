"""Metrics as users give them: names, classes and objects, and functions."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch

from fedspan.core import tables
from fedspan.core.errors import SpecError, shown
from fedspan.core.metric import Metric, column_of
from fedspan.metrics._collected import Collected, one_number

Tensor = torch.Tensor
# Columns of every run.
RESERVED = (
    "round", "up_bytes", "down_bytes", "total_bytes", "seconds", "loss", "training_loss", "events", "diverged",
)  # fmt: skip
TRUTHS = ("y_true", "true", "target", "targets", "label", "labels", "actual")  # first arguments


def chosen(given: Sequence[Any]) -> dict[str, Metric]:
    """Return name → a fresh metric, from all that a user may give."""
    found: dict[str, Metric] = {}
    for one in given:
        metric, name = _fresh(one), column_of(one)
        if name in RESERVED:
            raise SpecError(
                f"`metrics` {name!r} is the name of a column of every run; give it another name"
            )
        first = found.setdefault(name, metric)
        same = type(first) is type(metric) and repr(vars(first)) == repr(vars(metric))
        if first is not metric and (not same or isinstance(metric, Own)):
            raise SpecError(
                f"`metrics` {name!r} is there twice; give one of them another `__name__`"
            )
    return found


def _fresh(given: Any) -> Metric:
    if isinstance(given, str):
        named: Metric = tables.build("metric", given, "metrics")
        return named
    if isinstance(given, type):
        try:
            given = given()
        except (TypeError, ValueError) as error:
            raise SpecError(
                f"`metrics` {given.__name__} cannot be made without settings ({error}); write {given.__name__}(…)"
            ) from None
    if isinstance(given, Metric):
        return copy.deepcopy(given)
    if callable(given):
        return Own(given)
    raise SpecError(
        f"`metrics` must be names, metrics or functions of (outputs, targets), got {shown(given)}"
    )


class Own(Collected):
    """A function of (outputs, targets), of all examples at once."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        self.given = given

    def summary(self) -> None:
        """Return nothing: a function of one's own may be any."""

    def value(self, outputs: Tensor, targets: Tensor) -> float:
        """Return what it computes."""
        name = column_of(self.given)
        if _first_argument(self.given) in TRUTHS:  # as in scikit-learn
            raise SpecError(
                f"`metrics` {name} takes the truth first; give a function of (outputs, targets), such as "
                f"lambda outputs, targets: {name}(targets, outputs.argmax(1))"
            )
        what, arguments = f"`metrics` {name}", "(outputs, targets)"
        return one_number(lambda: self.given(outputs, targets), what, arguments)


def _first_argument(function: Any) -> str:
    """Return the name of a function's first argument; empty if Python cannot tell."""
    try:
        return next(iter(inspect.signature(function).parameters), "")
    except (TypeError, ValueError):
        return ""
