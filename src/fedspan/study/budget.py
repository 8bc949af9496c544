"""Budgets: compare methods at so many bytes up, bytes both ways, or rounds.

The number of rounds is known before a run: the first messages are packed and counted (`fedspan.costs`).
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from fedspan.core import registry
from fedspan.core.errors import SpecError, at_least, at_most, one_of, shown
from fedspan.core.spec import Spec, toml_value
from fedspan.costs.plan import price
from fedspan.costs.traffic import Cost
from fedspan.study.curves import Axis

UNITS = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}
KINDS: dict[str, Axis] = {"up": "up", "total": "total", "rounds": "round"}
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
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            raise SpecError(
                f"`budget` must be a text such as 'up=10MB', or a list of such, got {shown(given)}"
            )
        found: dict[Axis, float] = {}
        for text in texts:
            kind, sign, amount = (part.strip() for part in text.partition("="))
            if not sign:
                raise SpecError(
                    f"a budget is written up=10MB, total=50MB or rounds=200, got {shown(text)}"
                )
            one_of("budget", kind, KINDS)
            axis = KINDS[kind]
            if axis in found:
                raise SpecError(f"a budget of {kind!r} is given twice; give it once")
            if kind == "rounds":
                found[axis] = toml_value(amount)
                at_least(kind, found[axis], 1)
                at_most(kind, found[axis], FAR)
            else:
                found[axis] = _amount(amount)
                if not 1 <= found[axis] < 1e21:
                    raise SpecError(
                        f"a budget of bytes is at least 1 B, a number and one of the units {', '.join(UNITS)}, such as "
                        f"10MB, got {shown(amount)}"
                    )
        return Budget(found) if texts else None

    def texts(self) -> list[str]:
        """What `parse` reads this budget from."""
        return [
            f"rounds={most:.0f}" if axis == "round" else f"{axis}={most:.0f}B"
            for axis, most in self.limits.items()
        ]

    def words(self) -> str:
        """In words: 10 MB up."""
        ends = {"up": " up", "total": " both ways"}
        return " and ".join(
            f"{most:g} rounds" if axis == "round" else sized(most) + ends[axis]
            for axis, most in self.limits.items()
        )

    def rounds(self, spec: Spec) -> int:
        """The rounds of a spec that the budget allows, at least one; bytes are planned from packed messages."""
        found = self.allowed(spec)
        if found < 1:
            first = price(dataclasses.replace(spec, rounds=1))
            raise SpecError(
                f"a budget of {self.words()} is less than one round of {registry.name_of(spec.method)!r}, "
                f"which sends {sized(first.up)} up and {sized(first.down)} down"
            )
        return found

    def allowed(self, spec: Spec) -> int:
        """The same; 0 if the budget is less than one round."""
        return min(
            int(most) if axis == "round" else _affordable(spec, axis, most)
            for axis, most in self.limits.items()
        )


_courses: dict[str, Cost] = {}


def _affordable(spec: Spec, axis: Axis, most: float) -> int:
    """The last round at which a run has sent no more than `most` bytes.

    Step size and local steps do not change what a run sends, so a grid of step sizes is planned once.
    """
    method = dataclasses.replace(spec.method, lr=1.0, local_steps=1)  # type: ignore[type-var]
    long = dataclasses.replace(spec, rounds=FAR, method=method)
    key = json.dumps(long.table())
    if key not in _courses:
        _courses[key] = price(long)

    def spent(rounds: int) -> float:
        up, down = _courses[key].after(rounds)
        return up if axis == "up" else up + down

    if spent(FAR) <= most:
        return spec.rounds
    return bisect.bisect_right(range(1, FAR), most, key=spent)


def _amount(text: str) -> float:
    """Bytes of a text such as 10MB; nan if it is none."""
    found = re.fullmatch(r"([0-9.]+(?:e[+-]?[0-9]{1,3})?)\s*([A-Za-z]*)", text)
    try:
        return float(found[1]) * UNITS[found[2]] if found else math.nan
    except (KeyError, ValueError):
        return math.nan
