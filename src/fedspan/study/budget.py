"""Budgets: compare methods at so many bytes up, bytes both ways, or rounds; over a link, also at so many seconds.

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
from typing import Any

from fedspan.core import registry
from fedspan.core.errors import SpecError, at_least, at_most, one_of, shown
from fedspan.core.spec import Spec
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
class Link:
    """How fast a client is connected.

    Args:
        up: Bytes per second that a client can send.
        down: Bytes per second that it can receive.
        latency: Seconds per round besides the transfer.
        step: Seconds of a local step on the client's device.
    """

    up: float = math.inf
    down: float = math.inf
    latency: float = 0.0
    step: float = 0.0

    @staticmethod
    def parse(given: str | Link | None) -> Link:
        """From a text such as `up=1MB,down=4MB,latency=0.1,step=0.02`, all per second or in seconds."""
        if given is None or isinstance(given, Link):
            return given or Link()
        if not isinstance(given, str):
            raise SpecError(f"`link` must be a text such as 'up=1MB,down=4MB', got {shown(given)}")
        found: dict[str, float] = {}
        for text in given.split(","):
            key, _, amount = (part.strip() for part in text.partition("="))
            one_of("link", key, [field.name for field in dataclasses.fields(Link)])
            number, unit = _amount(amount)
            bytes_ = key in ("up", "down")
            if not (number > 0 and unit in UNITS if bytes_ else number >= 0 and not unit):
                raise SpecError(
                    f"`link` is written up=1MB,down=4MB,latency=0.1,step=0.02, got {shown(given)}"
                )
            found[key] = number * UNITS.get(unit, 1.0)
        return Link(**found)

    def seconds(self, up: float, down: float, local_steps: int) -> float:
        """Of a round in which a client sends and receives so many bytes."""
        return self.latency + self.step * local_steps + up / self.up + down / self.down


@dataclass(frozen=True)
class Budget:
    """The most that may be spent on each axis; a run ends when the first of them is used up."""

    limits: dict[Axis, float]
    link: Link = Link()
    seconds: float = math.inf  # over the link

    @staticmethod
    def parse(given: str | Sequence[str] | None, link: Link | None = None) -> Budget | None:
        """From texts such as `up=10MB`, `total=1.5GB` or `rounds=200`; None if there are none.

        With a `link` also from `seconds=3600`.
        """
        texts = [given] if isinstance(given, str) else () if given is None else given
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            raise SpecError(
                f"`budget` must be a text such as 'up=10MB', or a list of such, got {shown(given)}"
            )
        found: dict[str, float] = {}
        for text in texts:
            kind, sign, amount = (part.strip() for part in text.partition("="))
            if not sign:
                raise SpecError(
                    f"a budget is written up=10MB, total=50MB or rounds=200, got {shown(text)}"
                )
            one_of("budget", kind, KINDS if link is None else (*KINDS, "seconds"))
            if kind in found:
                raise SpecError(f"a budget of {kind!r} is given twice; give it once")
            number, unit = _amount(amount)
            if kind == "rounds":
                if not re.fullmatch(r"[0-9]{1,30}", amount):
                    raise SpecError(
                        f"a budget of rounds is a whole number such as rounds=200, got {shown(amount)}"
                    )
                at_least("rounds", int(amount), 1)
                at_most("rounds", int(amount), FAR)
            elif kind == "seconds":
                if unit or not number > 0:
                    raise SpecError(
                        f"a budget of seconds is a positive number such as seconds=3600, got {shown(text)}"
                    )
                if link == Link():
                    raise SpecError("a budget of seconds needs a `link` such as 'up=1MB,down=4MB'")
            elif unit not in UNITS or not number >= 0:
                raise SpecError(
                    f"bytes are written as a number and one of the units {', '.join(UNITS)}, such as 10MB, "
                    f"got {amount!r}"
                )
            elif not 1 <= number * UNITS[unit] < 1e21:
                raise SpecError(f"a budget must be at least 1 B and below 1e12 GB, got {amount!r}")
            found[kind] = number * UNITS.get(unit, 1.0)
        seconds = found.pop("seconds", math.inf)
        limits = {KINDS[kind]: value for kind, value in found.items()}
        return Budget(limits, link or Link(), seconds) if texts else None

    def texts(self) -> list[str]:
        """What `parse` reads this budget from."""
        names = {axis: kind for kind, axis in KINDS.items()}
        return [f"{names[a]}={v:.0f}{'' if a == 'round' else 'B'}" for a, v in self.limits.items()]

    def words(self) -> str:
        """In words: 10 MB up."""
        ends = {"up": " up", "total": " both ways"}
        words = [
            f"{most:g} rounds" if axis == "round" else sized(most) + ends[axis]
            for axis, most in self.limits.items()
        ]
        return " and ".join([*words, *([f"{self.seconds:g} s"] if self.seconds < math.inf else [])])

    def rounds(self, spec: Spec) -> int:
        """The rounds of a spec that the budget allows; bytes are planned from packed messages."""
        rounds = [] if self.limits else [spec.rounds]
        for axis, most in self.limits.items():
            rounds.append(int(most) if axis == "round" else _affordable(spec, axis, most))
        if self.seconds < math.inf and (each := self.per_round(spec)[2]) > 0:
            rounds.append(int(self.seconds / each))
        if min(rounds) < 1:
            first = price(dataclasses.replace(spec, rounds=1))
            raise SpecError(
                f"a budget of {self.words()} is less than one round of {registry.name_of(spec.method)!r}, "
                f"which sends {sized(first.up)} up and {sized(first.down)} down"
            )
        return min(rounds)

    def per_round(self, spec: Spec) -> tuple[float, float, float]:
        """Bytes up and down of one client in a round of a spec, and its seconds over the link."""
        cost = price(spec)
        seconds = self.link.seconds(cost.up_round, cost.down_round, spec.method.local_steps)
        return cost.up_round, cost.down_round, seconds


_courses: dict[str, Cost] = {}


def _affordable(spec: Spec, axis: Axis, most: float) -> int:
    """The last round at which a run has sent no more than `most` bytes.

    Step size and local steps do not change what a run sends, so a grid of step sizes is planned once.
    """
    method: Any = dataclasses.replace(spec.method, local_steps=1)  # type: ignore[type-var]
    long = dataclasses.replace(spec, rounds=FAR, method=method)
    table = long.table()
    key = json.dumps(table | {"method": table["method"] | {"lr": 1.0}})
    if key not in _courses:
        _courses[key] = price(long)

    def spent(rounds: int) -> float:
        up, down = _courses[key].after(rounds)
        return up if axis == "up" else up + down

    return (
        spec.rounds if spent(FAR) <= most else bisect.bisect_right(range(1, FAR), most, key=spent)
    )


def _amount(text: str) -> tuple[float, str]:
    """The number and the unit of a text such as 10MB; the number is nan where there is none."""
    found = re.fullmatch(r"([0-9.]+(?:e[+-]?[0-9]{1,3})?)\s*([A-Za-z]*)", text)
    try:
        return (float(found[1]), found[2]) if found else (math.nan, text)
    except ValueError:
        return math.nan, text
