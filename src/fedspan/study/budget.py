"""Budgets: compare methods at so many bytes up, bytes both ways, or rounds.

The number of rounds is known before a run: the first messages are packed and counted (`fedspan.costs`).
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedspan.core import registry
from fedspan.core.errors import SpecError, at_least, at_most, one_of, shown
from fedspan.core.spec import Spec
from fedspan.costs.plan import price
from fedspan.costs.traffic import Course
from fedspan.study.curves import Axis, Curve

UNITS = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}
KINDS: dict[str, Axis] = {"up": "up", "total": "total", "rounds": "round"}
MOST_BYTES = 1e21
FAR = 10**7  # more rounds than any run has


def sized(value: float) -> str:
    """Bytes with the unit that suits them: 12.5 MB."""
    name, unit = next((u for u in reversed(UNITS.items()) if value >= u[1]), ("B", 1.0))
    return f"{value / unit:.4g} {name}"


@dataclass(frozen=True)
class Budget:
    """The most that may be spent on each axis; a run ends when the first of them is used up."""

    limits: dict[Axis, float]

    @staticmethod
    def parse(given: str | Sequence[str] | None) -> Budget | None:
        """From texts such as `up=10MB`, `total=1.5GB` or `rounds=200`; None if there are none."""
        texts = [given] if isinstance(given, str) else () if given is None else given
        limits: dict[Axis, float] = {}
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            raise SpecError(
                f"`budget` must be a text such as 'up=10MB', or a list of such, got {shown(given)}"
            )
        for text in texts:
            kind, sign, amount = (part.strip() for part in text.partition("="))
            if not sign:
                raise SpecError(
                    f"a budget is written up=10MB, total=50MB or rounds=200, got {shown(text)}"
                )
            one_of("budget", kind, KINDS)
            if KINDS[kind] in limits:
                raise SpecError(f"a budget of {kind!r} is given twice; give it once")
            limits[KINDS[kind]] = _rounds(amount) if kind == "rounds" else _bytes(amount)
        return Budget(limits) if limits else None

    def texts(self) -> list[str]:
        """What `parse` reads this budget from."""
        names = {axis: kind for kind, axis in KINDS.items()}
        return [f"{names[a]}={v:.0f}{'' if a == 'round' else 'B'}" for a, v in self.limits.items()]

    def words(self) -> str:
        """In words: 10 MB up."""
        ends = {"round": " rounds", "up": " up", "total": " both ways"}
        return " and ".join(
            f"{v:g}{ends[a]}" if a == "round" else sized(v) + ends[a]
            for a, v in self.limits.items()
        )

    def within(self, curve: Curve) -> Curve:
        """The rows of a curve at which every seed is within the budget; at least the first."""
        rows = min(
            int(np.searchsorted(curve.most(axis), most, side="right"))
            for axis, most in self.limits.items()
        )
        return curve.until(int(curve.rounds[max(rows, 1) - 1]))

    def rounds(self, spec: Spec) -> int:
        """The rounds of a spec that the budget allows; bytes are planned from packed messages."""
        rounds = [
            int(most) if axis == "round" else _affordable(spec, axis, most)
            for axis, most in self.limits.items()
        ]
        if min(rounds) < 1:
            first = price(dataclasses.replace(spec, rounds=1))
            raise SpecError(
                f"a budget of {self.words()} is less than one round of {registry.name_of(spec.method)!r}, "
                f"which sends {sized(first.up)} up and {sized(first.down)} down"
            )
        return min(rounds)


def _affordable(spec: Spec, axis: Axis, most: float) -> int:
    """The last round at which a run has sent no more than `most` bytes."""
    course = _course(spec)

    def after(rounds: int) -> float:
        up, down = course.after(rounds)
        return up if axis == "up" else up + down

    if after(FAR) <= most:
        return spec.rounds
    return bisect.bisect_right(range(1, FAR), most, key=after)


_courses: dict[str, Course] = {}


def _course(spec: Spec) -> Course:
    """What a run sends. Step size and local steps do not change it, so a grid of step sizes is planned once."""
    method: Any = dataclasses.replace(spec.method, local_steps=1)  # type: ignore[type-var]
    long = dataclasses.replace(spec, rounds=FAR, method=method)
    table = long.table()
    key = json.dumps(table | {"method": table["method"] | {"lr": 1.0}})
    if key not in _courses:
        _courses[key] = price(long).course
    return _courses[key]


def _bytes(text: str) -> float:
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]{1,3})?)\s*([A-Za-z]+)", text)
    number, unit = found.groups() if found else (text, "")
    if unit not in UNITS:
        raise SpecError(
            f"bytes are written with one of the units {', '.join(UNITS)}, such as 10MB, got {text!r}"
        )
    try:
        value = float(number) * UNITS[unit]
    except ValueError:
        raise SpecError(
            f"bytes are written as a number and a unit, such as 10MB, got {text!r}"
        ) from None
    if not 1 <= value < MOST_BYTES:
        raise SpecError(f"a budget must be at least 1 B and below 1e12 GB, got {text!r}")
    return value


def _rounds(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,30}", text):
        raise SpecError(
            f"a budget of rounds is a whole number such as rounds=200, got {shown(text)}"
        )
    at_least("rounds", int(text), 1)
    at_most("rounds", int(text), FAR)
    return float(text)
