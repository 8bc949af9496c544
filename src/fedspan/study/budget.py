"""Budgets: compare methods at so many bytes up, bytes both ways, or rounds; over a link, also at so many seconds.

The number of rounds is known before a run: the first messages are packed and counted (`fedspan.costs`).
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
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
        found = {}
        for text in (given if isinstance(given, str) else "").split(","):
            key, _, amount = (part.strip() for part in text.partition("="))
            one_of("link", key, vars(Link()))
            found[key] = _amount(amount, UNITS if key in ("up", "down") else {"": 1.0})
            if not (found[key] > 0 or (found[key] == 0 and key in ("latency", "step"))):
                raise SpecError(
                    f"`link` is written up=1MB,down=4MB,latency=0.1,step=0.02, got {shown(given)}"
                )
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
            if kind == "rounds":
                found[kind] = toml_value(amount)
                at_least(kind, found[kind], 1)
                at_most(kind, found[kind], FAR)
            elif kind == "seconds":
                found[kind] = _amount(amount, {"": 1.0})
                if not found[kind] > 0 or link == Link():
                    raise SpecError(
                        "a budget of seconds is a positive number such as seconds=3600 and needs a `link` such as "
                        f"'up=1MB,down=4MB', got {shown(text)}"
                    )
            else:
                found[kind] = _amount(amount, UNITS)
                if not 1 <= found[kind] < 1e21:
                    raise SpecError(
                        f"a budget of bytes is at least 1 B, a number and one of the units {', '.join(UNITS)}, such as "
                        f"10MB, got {shown(amount)}"
                    )
        seconds = found.pop("seconds", math.inf)
        limits = {KINDS[kind]: value for kind, value in found.items()}
        return Budget(limits, link or Link(), seconds) if texts else None

    def texts(self) -> list[str]:
        """What `parse` reads this budget from."""
        return [
            f"rounds={most:.0f}" if axis == "round" else f"{axis}={most:.0f}B"
            for axis, most in self.limits.items()
        ]

    def words(self) -> str:
        """In words: 10 MB up."""
        ends = {"up": " up", "total": " both ways"}
        words = [
            f"{most:g} rounds" if axis == "round" else sized(most) + ends[axis]
            for axis, most in self.limits.items()
        ]
        if self.seconds < math.inf:
            words.append(f"{self.seconds:g} s")
        return " and ".join(words)

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


def _amount(text: str, units: Mapping[str, float]) -> float:
    """A number with one of some units, such as 10MB; nan if the text is none."""
    found = re.fullmatch(r"([0-9.]+(?:e[+-]?[0-9]{1,3})?)\s*([A-Za-z]*)", text)
    try:
        return float(found[1]) * units[found[2]] if found else math.nan
    except (KeyError, ValueError):
        return math.nan
